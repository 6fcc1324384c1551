"""`atoll sample`: settings and files that are refused."""

import pytest

from support.commands import refused


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--max-tokens", "-1"], []])
def test_sample_refuses_what_it_cannot_use(atoll, arguments):
    refused(atoll("sample", "no-such.safetensors", *arguments))


def test_sample_refuses_a_damaged_checkpoint(atoll, tmp_path):
    (tmp_path / "damaged.safetensors").write_bytes(b"\x08" + bytes(40))
    refused(atoll("sample", "damaged.safetensors"))
