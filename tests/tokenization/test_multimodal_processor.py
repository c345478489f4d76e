"""Images in prompts: the same ids and roles from every spelling, and an error wherever DeepInfer is silent."""

import copy
import io
import json
import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deepinfer_jax.tokenization import (
    ImageError,
    ImageInput,
    MultimodalProcessor,
    TextLengthInput,
    TokenType,
    get_hf_tokenizer,
)
from tests.support.image_rules import rules
from tests.support.paths import GOLDEN_A

pytestmark = pytest.mark.pure

VOCAB, PLACEHOLDER = 100, 90
# One patch is one cell here; by size: tokens.
TOKENS = {(4, 4): 4, (8, 4): 5, (4, 8): 6, (8, 12): 11}


class Letters:
    """Ids below 90 are characters from the blank on; the id 90 is <image>."""

    def get_vocab(self):
        return {chr(32 + token): token for token in range(PLACEHOLDER)} | {"<image>": PLACEHOLDER}

    def convert_ids_to_tokens(self, token):
        return next(name for name, value in self.get_vocab().items() if value == token)

    def decode(self, ids):
        return "".join(map(self.convert_ids_to_tokens, ids))


def processor(**options):
    small = rules(patch_size=4, downsample_ratio=1, max_image_tokens=20, min_pixels=0)
    given = {"image_token_id": PLACEHOLDER, "vocab_size": VOCAB} | options
    return MultimodalProcessor(small, Letters(), **given)


def pixels(size, shade=0):
    return np.full((size[1], size[0], 3), shade, np.uint8)


def text(string):
    return [ord(character) - 32 for character in string]


def sentinels(tokens):
    return [VOCAB + 2] + [VOCAB + 1] * (tokens - 1)


def test_a_placeholder_becomes_the_tokens_of_its_image():
    ids = np.array([*text("ab"), PLACEHOLDER, *text("c")])
    prompt = processor().overwrite_prompt(ids, {"image_bytes": [pixels((8, 4))], "image_sizes": [(8, 4)]})
    assert prompt.token_ids.dtype == prompt.mm_token_type.dtype == np.int32
    assert prompt.token_ids.tolist() == [*text("ab"), 102, 101, 101, 101, 101, *text("c")]
    assert prompt.mm_token_type.tolist() == [0, 0, 3, 2, 2, 5, 4, 0]
    before, image, after = prompt.segments
    assert (before, after) == (TextLengthInput(2), TextLengthInput(1))
    assert (image.width, image.height, image.start, image.stop) == (8, 4, 2, 7)
    assert prompt.images == (image,)
    assert image.image.patches().shape == (2, 48)
    assert len(image.image.digest) == 32


@given(
    runs=st.lists(st.text("abc", max_size=3), min_size=1, max_size=5),
    sizes=st.lists(st.sampled_from(sorted(TOKENS)), min_size=4, max_size=4),
)
def test_every_spelling_gives_the_same_prompt(runs, sizes):
    sizes = sizes[: len(runs) - 1]
    data = {"image_bytes": [pixels(size, shade) for shade, size in enumerate(sizes)]}
    spellings = {"single": [], "reference": [], "deepinfer": []}
    spans = []
    for run, size in zip(runs, [*sizes, None], strict=True):
        for ids in spellings.values():
            ids += text(run)
        if size is not None:
            spans.append((len(spellings["deepinfer"]), len(spellings["deepinfer"]) + TOKENS[size]))
            spellings["single"] += [PLACEHOLDER]
            spellings["reference"] += [PLACEHOLDER] * TOKENS[size]
            spellings["deepinfer"] += sentinels(TOKENS[size])
    for ids in spellings.values():
        prompt = processor().overwrite_prompt(ids, data)
        assert prompt.token_ids.tolist() == spellings["deepinfer"]
        assert [(image.start, image.stop) for image in prompt.images] == spans
        assert [(image.width, image.height) for image in prompt.images] == sizes
        assert [image.image.pixels.max() for image in prompt.images] == list(range(len(sizes)))
        is_image = prompt.mm_token_type >= TokenType.IMAGE
        assert is_image.tolist() == [token >= VOCAB for token in spellings["deepinfer"]]
        for image in prompt.images:
            roles = prompt.mm_token_type[image.start : image.stop]
            assert (roles[0], roles[-1]) == (TokenType.IMAGE_START, TokenType.IMAGE_END)
            assert (roles == TokenType.IMAGE).sum() == len(image.image.patches())
        assert [type(segment) for segment in prompt.segments] == [TextLengthInput, ImageInput] * len(sizes) + [
            TextLengthInput
        ]
        assert [segment.length for segment in prompt.segments[::2]] == [len(run) for run in runs]


def test_every_spelling_gives_the_golden_prompt():
    config = json.loads((GOLDEN_A / "config.json").read_text())
    vision = MultimodalProcessor(
        SimpleNamespace(**config["vision_config"]),
        get_hf_tokenizer(GOLDEN_A),
        image_token_id=config["image_token_id"],
        vocab_size=config["text_config"]["vocab_size"],
    )
    assert vision.placeholder == "<image>"
    golden = np.load(GOLDEN_A / "img.f32nq.npz")
    ids, types = golden["input_ids"][0], golden["token_types"][0]
    data = {"image_bytes": [golden["image0/rgb"], golden["image1/rgb"]], "image_sizes": [(60, 50), (37, 40)]}
    # The authors' types: -1 text, 0 start, 1 image, 2 new line, 3 end.
    roles = np.array([TokenType.IMAGE_START, TokenType.IMAGE, TokenType.IMAGE_NEW_LINE, TokenType.IMAGE_END, 0])[types]
    single = ids[(types <= 0) | (ids != config["image_token_id"])]
    for spelling in (ids, single):
        prompt = vision.overwrite_prompt(spelling, data)
        assert prompt.mm_token_type.tolist() == roles.tolist()
        assert prompt.token_ids[types == -1].tolist() == ids[types == -1].tolist()
        assert [image.start for image in prompt.images] == [5, 22]
        assert np.flatnonzero(prompt.token_ids == 194).tolist() == [5, 22]
        assert np.flatnonzero(prompt.token_ids == 193).tolist() == [*range(6, 13), *range(23, 26)]
        again = vision.overwrite_prompt(prompt.token_ids, data)
        assert again.token_ids.tolist() == prompt.token_ids.tolist()


@pytest.mark.parametrize("data", [None, {}, {"image_bytes": [], "image_sizes": []}, {"image_sizes": None}])
def test_a_prompt_of_text_alone_stays_text(data):
    prompt = processor().overwrite_prompt(text("abc"), data)
    assert prompt.token_ids.tolist() == text("abc")
    assert prompt.mm_token_type.tolist() == [0, 0, 0]
    assert prompt.segments == (TextLengthInput(3),)


def test_the_callers_data_stay_as_they_are():
    ids = np.array([PLACEHOLDER, 5], np.int32)
    png = io.BytesIO()
    Image.fromarray(pixels((8, 4))).save(png, "PNG")
    data = {"image_bytes": [png.getvalue()], "image_sizes": [(8, 4)]}
    given_ids, given_data = ids.copy(), copy.deepcopy(data)
    first, second = (processor().overwrite_prompt(ids, data) for _ in range(2))
    assert data == given_data
    assert ids.tolist() == given_ids.tolist()
    assert first.token_ids.tolist() == second.token_ids.tolist()
    alone = processor().overwrite_prompt(given_ids[1:], None)
    alone.token_ids[0] = 0
    assert given_ids[1] == 5


TWO = {"image_bytes": [pixels((4, 4)), pixels((8, 4))]}


@pytest.mark.parametrize(
    ("ids", "data", "message"),
    [
        (
            [PLACEHOLDER, 1],
            None,
            r"1 runs of image tokens \(1 tokens: 1\), but 0 images came with it",
        ),
        (
            [1, 2],
            TWO,
            r"0 runs of image tokens \(0 tokens: none\), but 2 images .* \(which take 4, 5 tokens\)",
        ),
        ([PLACEHOLDER], TWO, r"1 runs .*but 2 images"),
        ([PLACEHOLDER, 1] * 3, TWO, r"3 runs of image tokens \(3 tokens: 1, 1, 1\), but 2 images"),
        ([PLACEHOLDER] * 8, TWO, r"1 runs of image tokens \(8 tokens: 8\), but 2 images"),
        ([PLACEHOLDER] * 10, TWO, r"1 runs of image tokens \(10 tokens: 10\), but 2 images"),
        ([*[PLACEHOLDER] * 5, 1, *[PLACEHOLDER] * 4], TWO, r"2 runs of image tokens \(9 tokens: 5, 4\), but 2 images"),
        ([*[PLACEHOLDER] * 4, 1, PLACEHOLDER], TWO, r"2 runs of image tokens \(5 tokens: 4, 1\)"),
        ([*sentinels(5), *sentinels(4)], TWO, r"2 runs of image tokens \(9 tokens: 5, 4\)"),
        ([*sentinels(4), 1, *sentinels(6)], TWO, r"2 runs of image tokens \(10 tokens: 4, 6\)"),
        (sentinels(4), TWO, r"1 runs of image tokens \(4 tokens: 4\), but 2 images"),
        (sentinels(4), None, "but 0 images"),
        ([*sentinels(4), PLACEHOLDER], TWO, r"single placeholders \(id 90, 1 of them\) and expanded images \(id 102"),
        ([7, VOCAB + 1], TWO, "the id 101 at position 1 of the prompt is no part of an image"),
        ([*sentinels(4), 7, VOCAB + 1], TWO, "the id 101 at position 5"),
        ([VOCAB, VOCAB + 2], TWO, "the id 100 at position 0"),
        ([VOCAB + 4], None, "the id 104 at position 0"),
    ],
)
def test_placeholders_and_images_that_do_not_match_are_refused(ids, data, message):
    with pytest.raises(ValueError, match=message):
        processor().overwrite_prompt(ids, data)


@pytest.mark.parametrize("spelling", ["<Image>", "<img/>", "[image]", "< image >"])
def test_a_placeholder_spelled_differently_is_named(spelling):
    with pytest.raises(ValueError, match=rf"The prompt spells {re.escape(spelling)}; the placeholder is <image>$"):
        processor().overwrite_prompt(text(f"see {spelling}"), {"image_bytes": [pixels((4, 4))]})


def test_the_released_placeholder_is_found_and_one_with_other_bars_too(edited_dir, rename):
    # The tokenizer that tests have is of the release before: it has another name at this id.
    tokenizer = get_hf_tokenizer(edited_dir(tokenizer=rename({"<｜image2｜>": "<｜deepseek_image｜>"})))
    vision = MultimodalProcessor(rules(), tokenizer, image_token_id=129_264, vocab_size=129_280)
    assert vision.placeholder == "<｜deepseek_image｜>"
    data = {"image_bytes": [pixels((64, 48))]}
    prompt = vision.overwrite_prompt(tokenizer.encode("Look: <｜deepseek_image｜>!"), data)
    before, image, _ = prompt.segments
    assert tokenizer.decode(prompt.token_ids[: before.length][1:]) == "Look: "
    assert tokenizer.decode(prompt.token_ids[image.stop :]) == "!"
    assert prompt.token_ids[image.start : image.start + 2].tolist() == [129_282, 129_281]
    with pytest.raises(ValueError, match=r"spells <\|deepseek_image\|>; the placeholder is <｜deepseek_image｜>$"):
        vision.overwrite_prompt(tokenizer.encode("Look: <|deepseek_image|>!"), data)


def test_brackets_of_other_names_are_not_suspected():
    with pytest.raises(ValueError, match=r"as many tokens as it takes$"):
        processor().overwrite_prompt(text("<imagine> [b] imagery"), {"image_bytes": [pixels((4, 4))]})


def test_a_wrong_declared_size_is_refused():
    ids = [PLACEHOLDER, PLACEHOLDER]
    with pytest.raises(ImageError, match=r"image 1 of .*: its declared size is 8 x 12, but it has 8 x 4 pixels"):
        processor().overwrite_prompt(ids, TWO | {"image_sizes": [(4, 4), (8, 12)]})


def test_sizes_are_those_of_the_upright_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(pixels((8, 4))).save(file, "PNG", exif=exif)
    data = {"image_bytes": [file.getvalue()]}
    (image,) = processor().overwrite_prompt([PLACEHOLDER], data).images
    assert (image.width, image.height, image.stop) == (4, 8, TOKENS[4, 8])
    with pytest.raises(ImageError, match="an EXIF orientation may turn it"):
        processor().overwrite_prompt([PLACEHOLDER], data | {"image_sizes": [(8, 4)]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image_bytes": [b"junk"]}, "image 0 of the request: 4 bytes are not an image"),
        (
            {"image_bytes": [pixels((4, 4)), "no/such/file"]},
            r"image 1 of the request: the image file .* cannot be",
        ),
        ({"image_bytes": None}, r"\['image_bytes'\] is None: the images of the request never arrived"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(data, message):
    with pytest.raises(ImageError, match=message):
        processor().overwrite_prompt([PLACEHOLDER], data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"images": []}, r"unknown keys \['images'\]; it may hold \['image_bytes', 'image_sizes'\]"),
        ({"image_bytes": b"junk"}, "must be a list of images, not a bytes"),
        ({"image_bytes": [pixels((4, 4))], "image_sizes": []}, "has 1 images but 0 sizes"),
        ({"image_sizes": [(4, 4)]}, "has 0 images but 1 sizes"),
        ({"image_bytes": [pixels((4, 4))], "image_sizes": [4]}, r"is \(width, height\) in pixels, not 4"),
        ({"image_bytes": [pixels((4, 4))], "image_sizes": [(4, 4, 3)]}, r"not \(4, 4, 3\)"),
        ({"image_bytes": [pixels((4, 4))], "image_sizes": [(4.5, 4)]}, r"not \(4.5, 4\): two integers"),
        ({"image_bytes": [pixels((4, 4))], "image_sizes": [(float("inf"), 4)]}, r"not \(inf, 4\): two integers"),
    ],
)
def test_data_of_another_shape_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        processor().overwrite_prompt([PLACEHOLDER], data)


def test_on_request_mismatches_are_treated_as_deepinfer_does(caplog):
    tolerant = processor(on_image_mismatch="warn")
    with caplog.at_level(logging.WARNING):
        # More placeholders than images: those left over are plain tokens.
        prompt = tolerant.overwrite_prompt([PLACEHOLDER, 1, PLACEHOLDER], {"image_bytes": [pixels((4, 4))]})
        assert prompt.token_ids.tolist() == [*sentinels(4), 1, PLACEHOLDER]
        assert prompt.mm_token_type.tolist() == [3, 2, 5, 4, 0, 0]
        # More images than placeholders: those left over are dropped.
        prompt = tolerant.overwrite_prompt([1, PLACEHOLDER], TWO)
        assert prompt.token_ids.tolist() == [1, *sentinels(4)]
        assert len(prompt.images) == 1
        assert tolerant.overwrite_prompt([1, 2], TWO).token_ids.tolist() == [1, 2]
        # The declared size decides the layout; the image is fitted into it: 8 x 4 in 4 x 8 is 4 x 2, on grey.
        data = {"image_bytes": [pixels((8, 4))], "image_sizes": [(4, 8)]}
        (image,) = tolerant.overwrite_prompt([PLACEHOLDER], data).images
    assert (image.width, image.height, image.stop) == (4, 8, TOKENS[4, 8])
    assert image.image.pixels[:, 0, 0].tolist() == [127] * 3 + [0] * 2 + [127] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "ERROR", "WARNING"]
    # Matching prompts of the other spellings are understood, and broken ones refused.
    assert tolerant.overwrite_prompt([PLACEHOLDER] * 9, TWO).token_ids.tolist() == [*sentinels(4), *sentinels(5)]
    with pytest.raises(ValueError, match="runs of image tokens"):
        tolerant.overwrite_prompt(sentinels(7), TWO)


@pytest.mark.parametrize("ids", [[2**31], np.array([2**32 + 5]), [1.5], [[1, 2]]])
def test_what_is_no_list_of_int32_is_refused(ids):
    with pytest.raises(ValueError, match="a prompt is one list of token ids, all int32"):
        processor().overwrite_prompt(ids, None)


def test_an_unknown_way_to_treat_mismatches_is_refused():
    with pytest.raises(ValueError, match='on_image_mismatch must be "raise" or "warn", not \'ignore\''):
        processor(on_image_mismatch="ignore")


def test_tokenizer_and_config_must_agree_by_name_and_by_id():
    with pytest.raises(ValueError, match=r"<image> has id 90, but config\.json has image_token_id 91"):
        processor(image_token_id=91)

    class Shared(Letters):
        def convert_ids_to_tokens(self, token):
            return "z" if token == PLACEHOLDER else super().convert_ids_to_tokens(token)

    with pytest.raises(ValueError, match="encodes <image> as image_token_id 90, but calls that id 'z'"):
        MultimodalProcessor(rules(), Shared(), image_token_id=PLACEHOLDER, vocab_size=VOCAB)
