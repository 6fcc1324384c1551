import hashlib
import math

import pytest
import torch

from atoll.compression.kernels.hadamard import seeded_basis

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("width", "k"),
    [(1, 1), (2, 1), (3, 3), (7, 5), (64, 64), (96, 12), (127, 127), (384, 96), (1_000, 125)],
)
def test_columns_are_orthonormal(width, k):
    basis_DK = seeded_basis(width, k, 5, CPU).double()
    error = float((basis_DK.T @ basis_DK - torch.eye(k)).abs().max())
    assert error <= 2.0**-23  # the rounding of 1 / sqrt(block), twice


def test_columns_are_signs_and_orthogonal_as_integers():
    signs_DK = seeded_basis(384, 384, 5, CPU).sign().double()
    products = signs_DK.T @ signs_DK
    assert torch.equal(products, torch.diag(products.diag()))
    assert sorted(products.diag().unique().tolist()) == [128, 256]


def test_bits_do_not_depend_on_the_machine():
    basis = seeded_basis(384, 96, 1_234_567_890_123, CPU)
    digest = hashlib.sha256(basis.numpy().tobytes()).hexdigest()
    assert digest == "54140af622a640d5c5643c6461f94849a7eaee88f5bdbfc2e90bf4ac8cc3ebed"


@pytest.mark.parametrize(("width", "k"), [(256, 32), (384, 48), (5_120, 160)])
def test_all_coordinates_weigh_alike(width, k):
    weights_D = seeded_basis(width, k, 5, CPU).square().sum(1)
    torch.testing.assert_close(weights_D, torch.full((width,), k / width))


@pytest.mark.parametrize("width", [1, 5, 96, 1_001])
def test_any_number_of_columns_is_shared_out(width):
    for k in range(1, width + 1, max(1, width // 7)):
        norms_K = seeded_basis(width, k, 0, CPU).norm(dim=0)
        torch.testing.assert_close(norms_K, torch.ones(k))


def test_what_is_left_over_goes_to_the_largest_block():
    assert int(seeded_basis(384, 1, 5, CPU).count_nonzero()) == 256
    assert seeded_basis(385, 3, 5, CPU).count_nonzero(0).tolist() == [256, 256, 128]


def test_seeds_give_subspaces_that_are_apart():
    """The squared cosines of k directions with another k-space add up to k^2 / width on average."""
    width, k = 512, 64
    bases = [seeded_basis(width, k, seed, CPU) for seed in range(8)]
    shared = [float((a.T @ b).square().sum()) for i, a in enumerate(bases) for b in bases[i + 1 :]]
    assert math.isclose(sum(shared) / len(shared), k * k / width, rel_tol=0.1)
    assert max(shared) < 1.5 * k * k / width
