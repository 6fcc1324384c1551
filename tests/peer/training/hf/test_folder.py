"""Folders of weights: what is read, what is refused, and the digest."""

import json

import pytest
import torch
from safetensors.torch import save_file

from atoll.peer.errors import ModelError
from atoll.peer.training.hf.folder import WeightFolder, expect_weights, weights_digest

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(4.0).to(torch.bfloat16),
    "c": torch.tensor(3.0),
}


def write(path, tensors=None, *, name="model.safetensors"):
    path.mkdir(exist_ok=True)
    save_file(TENSORS if tensors is None else tensors, path / name)
    return path


def in_pieces(path, weight_map=None):
    """The same tensors in a file each, with an index."""
    path.mkdir()
    names = {name: f"model-{i}.safetensors" for i, name in enumerate(reversed(TENSORS))}
    for name, file in names.items():
        save_file({name: TENSORS[name]}, path / file)
    index = {"weight_map": names if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_the_digest_depends_on_the_tensors_and_not_on_the_files(tmp_path):
    whole = weights_digest(write(tmp_path / "whole"))
    assert whole == weights_digest(in_pieces(tmp_path / "pieces"))
    assert whole == weights_digest(write(tmp_path / "named", name="weights.safetensors"))
    expect_weights(tmp_path / "pieces", whole)
    expect_weights(tmp_path / "pieces", None)


@pytest.mark.parametrize(
    "change",
    [
        {"c": torch.tensor(4.0)},
        {"c": torch.tensor([3.0])},
        {"a.weight": TENSORS["a.weight"].view(3, 2)},
        {"b.weight": TENSORS["b.weight"].float()},
        {"d": torch.tensor(3.0)},
    ],
)
def test_another_value_shape_type_or_name_is_another_digest(tmp_path, change):
    whole = weights_digest(write(tmp_path / "whole"))
    write(tmp_path / "other", TENSORS | change)
    with pytest.raises(ModelError, match=f"expected the SHA-256 {whole[:12]}, got"):
        expect_weights(tmp_path / "other", whole)


def test_a_file_that_changes_under_its_name_is_read_again(tmp_path):
    before = weights_digest(write(tmp_path / "whole"))
    write(tmp_path / "whole", {"a": torch.ones(9)})
    assert weights_digest(tmp_path / "whole") != before


def test_tensors_are_read_as_the_file_has_them(tmp_path):
    with WeightFolder(in_pieces(tmp_path / "pieces")) as folder:
        assert folder.names == set(TENSORS)
        read = folder.tensor("b.weight", (4,))
    assert read.dtype == torch.bfloat16 and torch.equal(read, TENSORS["b.weight"])


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ModelError, match=r"pickled weights are not read.*save_pretrained"):
        WeightFolder(tmp_path)


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path):
    write(tmp_path / "secret")
    index = {"a.weight": "../secret/model.safetensors"}
    with pytest.raises(ModelError, match="names of files beside it"):
        WeightFolder(in_pieces(tmp_path / "pieces", index))


@pytest.mark.parametrize("weight_map", [[1], {}, {"a": 3}, "model.safetensors"])
def test_an_index_of_something_else_is_refused(tmp_path, weight_map):
    with pytest.raises(ModelError, match="weight_map"):
        WeightFolder(in_pieces(tmp_path / "pieces", weight_map))


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    pieces = in_pieces(tmp_path / "pieces")
    (pieces / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1.safetensors is missing.*finish the download"):
        WeightFolder(pieces)
    with pytest.raises(ModelError, match="is not a folder"):
        WeightFolder(pieces / "model-0.safetensors")
    with pytest.raises(ModelError, match=r"got 2 files$"):
        (pieces / "model.safetensors.index.json").unlink()
        WeightFolder(pieces)


def test_a_damaged_file_is_refused(tmp_path):
    path = write(tmp_path / "whole") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="not an intact safetensors file"):
        weights_digest(tmp_path / "whole")


def test_two_files_with_one_tensor_are_refused(tmp_path):
    pieces = in_pieces(tmp_path / "pieces")
    save_file({"c": torch.tensor(9.0)}, pieces / "model-1.safetensors")
    with pytest.raises(ModelError, match="two files hold the tensor 'c'"), WeightFolder(pieces):
        pass


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    tensors = TENSORS | {"q": torch.arange(4, dtype=torch.int8)}
    with WeightFolder(write(tmp_path / "whole", tensors)) as folder:
        with pytest.raises(ModelError, match=r"expected 'c' of shape \(2,\), got \(\)"):
            folder.tensor("c", (2,))
        with pytest.raises(ModelError, match="lack 'z'"):
            folder.tensor("z", (2,))
        with pytest.raises(ModelError, match="'q' as I8, but training needs"):
            folder.tensor("q", (4,))


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\0"])
def test_a_config_of_something_else_is_refused(tmp_path, text):
    (write(tmp_path / "whole") / "config.json").write_text(text)
    with pytest.raises(ModelError, match="expected a JSON object"):
        _ = WeightFolder(tmp_path / "whole").config


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config.json: cannot be read: No such file"):
        _ = WeightFolder(write(tmp_path / "whole")).config
