"""Structured outputs: JSON schemas, regular expressions, choices and others are converted to a llguidance grammar.

Routers, clients and offline users convert; instances accept no other form. Nothing here needs a tokenizer.
"""

from baton.grammar.json_schema import check_schema, json_rule
from baton.grammar.structured_outputs import (
    StructuredOutputs,
    choice_grammar,
    ebnf_or_lark_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    lark_string,
    regex_grammar,
    structural_tag_grammar,
)
from baton.grammar.validation import check_grammar

__all__ = [
    "StructuredOutputs",
    "check_grammar",
    "check_schema",
    "choice_grammar",
    "ebnf_or_lark_grammar",
    "json_object_grammar",
    "json_rule",
    "json_schema_grammar",
    "lark_grammar",
    "lark_string",
    "regex_grammar",
    "structural_tag_grammar",
]
