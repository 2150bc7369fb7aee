"""Text: tokenizer, chat template, incremental detokenizer, stop strings.

Only the router and the SDK have text; workers take and give token ids. Nothing here imports torch or transformers.
"""

from baton.text.chat_template import ChatTemplate
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.model import TextModel, TextModelCache
from baton.text.stop import StopStringMatcher, StopStrings
from baton.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopStringMatcher",
    "StopStrings",
    "TextModel",
    "TextModelCache",
    "Tokenizer",
]
