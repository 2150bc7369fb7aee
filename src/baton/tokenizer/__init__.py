"""Text: tokenizer, chat template, incremental detokenizer, stop strings.

Only the router and the SDK handle text; workers exchange token ids. Nothing here imports torch or transformers.
"""

from baton.tokenizer.chat_template import ChatTemplate
from baton.tokenizer.detokenizer import (
    IncrementalDetokenizer,
    SequenceText,
    StopStringMatcher,
    StopStrings,
    TextDelta,
    TokenDelta,
)
from baton.tokenizer.tokenizer import PromptText, TextModel, TextModelCache, Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "PromptText",
    "SequenceText",
    "StopStringMatcher",
    "StopStrings",
    "TextDelta",
    "TextModel",
    "TextModelCache",
    "TokenDelta",
    "Tokenizer",
]
