"""Rules that a released checkpoint's tokenizer must keep, and the three repairs that they allow (DB §3.2).

Check, repair as little as possible, check again. A refused tokenizer is never modified.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

logger = logging.getLogger(__name__)

BOS_TOKEN, BOS_ID = "<｜begin▁of▁sentence｜>", 0
EOS_TOKEN, EOS_ID = "<｜end▁of▁sentence｜>", 1
PAD_TOKEN, PAD_ID = "<｜▁pad▁｜>", 2
RELEASED_VOCAB_SIZE = 129_280
# name -> id. The ids coincide with the image sentinels V…V+4 (ImageTokenOffset); the names make them printable.
SPAN_TOKENS = {f"<|place_holder_mm_span_{i:04d}|>": RELEASED_VOCAB_SIZE + i for i in range(21)}

_LAST_SPAN_ID = RELEASED_VOCAB_SIZE + len(SPAN_TOKENS) - 1


def _bos(tokenizer: Any) -> str | None:
    if (tokenizer.bos_token, tokenizer.bos_token_id) == (BOS_TOKEN, BOS_ID):
        return None
    return f"BOS is {tokenizer.bos_token!r} with id {tokenizer.bos_token_id}, expected {BOS_TOKEN!r} with id {BOS_ID}"


def _eos(tokenizer: Any) -> str | None:
    if (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS_TOKEN, EOS_ID):
        return None
    return f"EOS is {tokenizer.eos_token!r} with id {tokenizer.eos_token_id}, expected {EOS_TOKEN!r} with id {EOS_ID}"


def _pad(tokenizer: Any) -> str | None:
    held = tokenizer.get_vocab().get(PAD_TOKEN)
    if held != PAD_ID:
        return f"{PAD_TOKEN!r} has {'no id' if held is None else f'id {held}'}, expected id {PAD_ID}"
    if tokenizer.pad_token not in (EOS_TOKEN, PAD_TOKEN):
        return (
            f"PAD is {tokenizer.pad_token!r} with id {tokenizer.pad_token_id}, expected {PAD_TOKEN!r} with id {PAD_ID} "
            f"or its alias {EOS_TOKEN!r}"
        )
    return None


def _flags(tokenizer: Any) -> str | None:
    add_bos = getattr(tokenizer, "add_bos_token", None)
    add_eos = getattr(tokenizer, "add_eos_token", None)
    if add_bos not in (True, False):
        return f"add_bos_token is {add_bos!r}, expected true or false"
    if add_eos is not False:
        return f"add_eos_token is {add_eos!r}, expected false: the prompt would end with {EOS_TOKEN!r} (id {EOS_ID})"
    return None


def _missing_spans(tokenizer: Any) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return [name for name in SPAN_TOKENS if name not in vocabulary]


def _spans(tokenizer: Any) -> str | None:
    vocabulary = tokenizer.get_vocab()
    present = [name for name in SPAN_TOKENS if name in vocabulary]
    for name in present:
        if vocabulary[name] != SPAN_TOKENS[name]:
            return f"{name!r} has id {vocabulary[name]}, expected id {SPAN_TOKENS[name]}"
    # Missing names are appended in order, so each will get the id that the length leaves for it.
    for appended, name in enumerate(_missing_spans(tokenizer)):
        if len(tokenizer) + appended != SPAN_TOKENS[name]:
            return (
                f"{name!r} would be appended with id {len(tokenizer) + appended}, expected id {SPAN_TOKENS[name]}: the "
                f"tokenizer has {len(tokenizer)} entries, expected {RELEASED_VOCAB_SIZE + len(present)}"
            )
    if len(tokenizer) != RELEASED_VOCAB_SIZE + len(present):
        last = max(vocabulary, key=vocabulary.__getitem__)
        return (
            f"{last!r} has id {vocabulary[last]}, beyond the last span token's {_LAST_SPAN_ID}: the tokenizer has "
            f"{len(tokenizer)} entries, expected {RELEASED_VOCAB_SIZE + len(present)}"
        )
    return None


_RULES = (
    (f"BOS is {BOS_TOKEN} with id {BOS_ID}", _bos),
    (f"EOS is {EOS_TOKEN} with id {EOS_ID}", _eos),
    (f"PAD is {PAD_TOKEN} with id {PAD_ID}, or aliases EOS", _pad),
    ("BOS can be switched on, EOS is not appended", _flags),
    (f"{len(SPAN_TOKENS)} span tokens have, or would get, ids {RELEASED_VOCAB_SIZE}…{_LAST_SPAN_ID}", _spans),
)


def release_rules(tokenizer: Any) -> list[tuple[str, str | None]]:
    """Every rule of the release policy on a Hugging Face tokenizer as loaded, before repairs (DB §3.2).

    Returns:
        (rule, reason) in a fixed order; the reason is None when the rule holds.
    """
    return [(rule, check(tokenizer)) for rule, check in _RULES]


def apply_release_policy(tokenizer: Any) -> Any:
    """The tokenizer with the release policy enforced: BOS inserted, PAD = id 2, 21 span tokens (DB §3.2).

    The argument is never modified: repairs go to a copy, and the argument itself comes back when none is needed.
    One line is logged when something was repaired.

    Raises:
        ValueError: a rule is broken; says which token has which id and which was expected.
    """
    _refuse([reason for _, reason in release_rules(tokenizer) if reason])

    insert_bos = tokenizer.add_bos_token is not True
    set_pad = tokenizer.pad_token != PAD_TOKEN
    missing = _missing_spans(tokenizer)
    repairs: list[str] = []
    repaired = copy.deepcopy(tokenizer) if insert_bos or set_pad or missing else tokenizer
    if insert_bos:
        repaired.add_bos_token = True
        repairs.append(f"{BOS_TOKEN} (id {BOS_ID}) is inserted before every text")
    if set_pad:
        repaired.pad_token = PAD_TOKEN
        repairs.append(f"PAD is {PAD_TOKEN} (id {PAD_ID}) instead of {tokenizer.pad_token}")
    if missing:
        repaired.add_tokens(missing, special_tokens=True)
        repairs.append(f"{len(missing)} span tokens added at {SPAN_TOKENS[missing[0]]}…{SPAN_TOKENS[missing[-1]]}")

    _refuse(_broken_after_repair(repaired))
    if repairs:
        logger.info("Tokenizer repaired for the release policy: %s", "; ".join(repairs))
    return repaired


def _broken_after_repair(tokenizer: Any) -> list[str]:
    """What a custom class may still do wrong although every rule held and every repair was made."""
    broken = []
    if (empty := list(tokenizer.encode("", add_special_tokens=True))) != [BOS_ID]:
        broken.append(f"the empty text encodes to {empty}, expected [{BOS_ID}]")
    if tokenizer.pad_token_id != PAD_ID:
        broken.append(f"PAD has id {tokenizer.pad_token_id}, expected {PAD_ID}")
    for name, expected in SPAN_TOKENS.items():
        if (found := tokenizer.convert_tokens_to_ids(name)) != expected:
            broken.append(f"{name!r} has id {found}, expected {expected}")
            break
    return broken


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(
            f"the tokenizer does not satisfy the release policy: {'; '.join(reasons)}. Use the tokenizer files of "
            'the checkpoint, or set "tokenizer_compatibility": "native" in config.json to take them as they are.'
        )
