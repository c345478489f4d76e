"""Wire values of image offsets and roles, the placeholder's name, and that the package stays light."""

import subprocess
import sys

import pytest

from deepinfer_jax.tokenization import ImageTokenOffset, TokenType, find_image_placeholder

pytestmark = pytest.mark.pure


def test_image_token_offsets_have_their_wire_values():
    # DB §4.1.
    assert {member.name: int(member) for member in ImageTokenOffset} == {
        "IMAGE_START": 0,
        "IMAGE_PAD": 1,
        "IMAGE": 2,
        "IMAGE_NEW_LINE": 3,
        "IMAGE_END": 4,
        "NUM_SPECIAL": 5,
    }
    assert {member.name: int(member) for member in TokenType} == {
        "UNDEFINED": 0,
        "TEXT": 1,
        "IMAGE": 2,
        "IMAGE_START": 3,
        "IMAGE_END": 4,
        "IMAGE_NEW_LINE": 5,
        "IMAGE_PAD": 6,
    }


def test_the_first_known_name_is_the_placeholder():
    assert find_image_placeholder({"<image>": 7, "<｜deepseek_image｜>": 9}, 7) == "<image>"
    assert find_image_placeholder({"<｜deepseek_image｜>": 129_264}, 129_264) == "<｜deepseek_image｜>"


def test_a_placeholder_with_another_id_is_refused():
    with pytest.raises(ValueError, match=r"<image> has id 7, but config\.json has image_token_id 9"):
        find_image_placeholder({"<image>": 7, "<｜deepseek_image｜>": 9}, 9)


def test_importing_the_package_loads_neither_jax_nor_transformers():
    code = "import sys, deepinfer_jax.tokenization; print(sorted({'jax', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
