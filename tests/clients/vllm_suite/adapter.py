"""A pytest plugin for vLLM's tests: Baton's dialects under the interfaces of its parsers, Baton's router as its server.

The tests import ``vllm``, which is not installed: modules of that name come from here. Names of parsers are adapters
of Baton's dialects, messages are models with the fields that the tests use, and tokenizers, which the tests would
download, are the demo model's with the families' anchors as tokens. What Baton has no counterpart of fails when used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import anthropic
import openai
import pydantic
import pytest
import tokenizers
import transformers

from baton.dialects import CallArguments, CallStart, DialectParser, Event, Reasoning, Text
from baton.dialects.builtin import REASONING_DIALECTS, TOOL_DIALECTS
from baton.dialects.syntax import ReasoningDialect, ToolDialect
from baton.dialects.token_anchors import TokenAnchors

_TOKENIZER = Path(__file__).resolve().parents[3] / "models" / "baton-tiny" / "tokenizer.json"


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")


class FunctionDefinition(_Message):
    name: str
    parameters: Any = None


class ChatCompletionToolsParam(_Message):
    type: str = "function"
    function: FunctionDefinition


class ChatCompletionRequest(_Message):
    messages: list[Any] = []
    model: str | None = None
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True


class FunctionCall(_Message):
    name: str
    arguments: str


class ToolCall(_Message):
    id: str = ""
    type: str = "function"
    function: FunctionCall


class ExtractedToolCallInformation(_Message):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(_Message):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(_Message):
    index: int
    id: str | None = None
    type: str | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(_Message):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = []


class EveryName(dict[str, Any]):
    """Schemas of a test that offers no tools: every name is one of a tool."""

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True


class ToolParser:
    """A dialect of tools as one of vLLM's parsers.

    Args:
        tokenizer: Tokenizer of the test.
        tools: Tools that are offered; ``None``: those of the requests.
    """

    dialect: ClassVar[ToolDialect]

    def __init__(self, tokenizer: Any, tools: Any = None, **_: Any) -> None:
        self.model_tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab()
        self._tools = tools
        self._parser: DialectParser | None = None
        self.at_end = False
        """Whether the delta that comes is none, but the end: vLLM's parsers do not hear of that."""

    def _begin(self, request: Any) -> DialectParser:
        tools = self._tools or getattr(request, "tools", None)
        schemas = dict(map(_name_and_schema, tools)) if tools else EveryName()
        return DialectParser(self.dialect, schemas=schemas)

    def adjust_request(self, request: Any) -> Any:
        """Return a request as it is: special tokens that are anchors are never left out."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        parser = self._begin(request)
        events = [*parser.feed(model_output), *parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Text))
        calls = [
            ToolCall(id=event.id, function=FunctionCall(name=event.name, arguments=_arguments(events, event.index)))
            for event in events
            if isinstance(event, CallStart)
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if self._parser is None or (not previous_text and current_text == delta_text):
            self._parser = self._begin(request)
        return _delta_message(self._parser.finish() if self.at_end else self._parser.feed(delta_text))


def _arguments(events: Iterable[Event], index: int) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index)


def _name_and_schema(tool: Any) -> tuple[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else getattr(tool, "function", None) or tool
    if isinstance(function, Mapping):
        return function["name"], function.get("parameters") or {}
    return function.name, function.parameters or {}


def _delta_message(events: Iterable[Event]) -> DeltaMessage | None:
    message = DeltaMessage()
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        match event:
            case Text():
                message.content = (message.content or "") + event.text
            case Reasoning():
                message.reasoning = (message.reasoning or "") + event.text
            case CallStart():
                named = DeltaFunctionCall(name=event.name, arguments="")
                calls[event.index] = DeltaToolCall(index=event.index, id=event.id, type="function", function=named)
            case CallArguments():
                call = calls.setdefault(
                    event.index, DeltaToolCall(index=event.index, function=DeltaFunctionCall(arguments=""))
                )
                assert call.function is not None
                call.function.arguments = (call.function.arguments or "") + event.text
    message.tool_calls = list(calls.values())
    return message if message.tool_calls or message.content or message.reasoning else None


class ReasoningParser:
    """A dialect of reasoning as one of vLLM's parsers, whose content keeps the text of calls.

    Args:
        tokenizer: Tokenizer of the test.
        chat_template_kwargs: Variables of the template, which may switch reasoning off.
    """

    dialect: ClassVar[ReasoningDialect]
    tools: ClassVar[ToolDialect | None] = None
    """What also ends reasoning."""
    opened: ClassVar[bool] = True
    """Whether the family's template begins the answer's reasoning, unless it is switched off."""

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        self.model_tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab()
        tools = self.tools
        if tools is not None:  # a section without notations has no calls: it is text, which tests expect here
            tools = dataclasses.replace(
                tools, sections=tuple(dataclasses.replace(section, calls=()) for section in tools.sections)
            )
        self._anchors = TokenAnchors(tools, self.dialect, dict(enumerate(_ANCHORS)))
        variables = chat_template_kwargs or {}
        self._opened = variables.get("enable_thinking", variables.get("thinking", self.opened))
        self._parser: DialectParser | None = None
        self.start_token, self.end_token = self.dialect.begin, self.dialect.end
        self.start_token_id, self.end_token_id = self.vocab.get(self.start_token), self.vocab.get(self.end_token)

    def _begin(self) -> DialectParser:
        anchors = self._anchors
        prompt = self.dialect.begin if self._opened else ""
        return DialectParser(anchors.tools, anchors.reasoning, schemas={}, prompt=anchors.mark_prompt(prompt))

    def _feed(self, parser: DialectParser, text: str) -> list[Event]:
        marked = self._anchors.mark_prompt(text)  # what the tokenizer of the test makes of it
        places = [at - done for done, at in enumerate(at for at, char in enumerate(marked) if char == "\ufdd0")]
        return parser.feed(text, places)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        parser = self._begin()
        message = _delta_message([*self._feed(parser, model_output), *parser.finish()]) or DeltaMessage()
        return message.reasoning, message.content

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        if self._parser is None or not previous_text:
            self._parser = self._begin()
        return _delta_message(self._feed(self._parser, delta_text))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        for token_id in reversed(input_ids):
            if token_id in (self.start_token_id, self.end_token_id):
                return token_id == self.end_token_id
        return not self._opened

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.end_token_id in delta_ids or not self._opened

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids[input_ids.index(self.end_token_id) + 1 :] if self.end_token_id in input_ids else []


# --- which dialect stands for which parser ---

_TOOL_CLASSES = {
    **{"Hermes2ProToolParser": "hermes", "Granite4ToolParser": "granite", "GraniteEngineToolParser": "granite"},
    **{"Llama3JsonToolParser": "llama3_json", "KimiK2ToolParser": "kimi_k2", "MinimaxM2ToolParser": "minimax_m2"},
    **{"DeepSeekV3ToolParser": "deepseek_v3", "DeepSeekV31ToolParser": "deepseek_v3.1"},
    **{"DeepSeekV32EngineToolParser": "deepseek_v3.2", "Glm47MoeModelToolParser": "glm4"},
    "Qwen3EngineToolParser": "qwen3_coder",
}
_TOOL_NAMES = {
    **{"hermes": "hermes", "llama3_json": "llama3_json", "pythonic": "pythonic", "llama4_pythonic": "pythonic"},
    **{"olmo3": "pythonic", "granite": "granite", "granite-20b-fc": "granite", "granite4": "granite"},
    **{"deepseek_v3": "deepseek_v3", "deepseek_v31": "deepseek_v3.1", "deepseek_v32": "deepseek_v3.2"},
    **{"glm45": "glm4", "glm47": "glm4", "kimi_k2": "kimi_k2", "minimax_m2": "minimax_m2"},
    **{"qwen3_coder": "qwen3_coder", "qwen3_xml": "qwen3_coder"},
}
_REASONING = {
    "qwen3": ("think", "qwen3_coder", True),
    "deepseek_r1": ("deepseek_r1", None, True),
    "deepseek_v3": ("think", None, False),
    "glm45": ("think", "glm4", True),
    "kimi_k2": ("think", "kimi_k2", True),
    "minimax_m2": ("deepseek_r1", "minimax_m2", True),
    "olmo3": ("think", None, True),
}
_REASONING_CLASSES = {
    "KimiK2ReasoningParser": "kimi_k2",
    "DeepSeekR1ReasoningParser": "deepseek_r1",
    "DeepSeekV3ReasoningParser": "deepseek_v3",
}


@functools.cache
def _tool_parser(dialect: str) -> type[ToolParser]:
    return type(f"Baton_{dialect}", (ToolParser,), {"dialect": TOOL_DIALECTS[dialect]})


@functools.cache
def _reasoning_parser(name: str) -> type[ReasoningParser]:
    dialect, tools, opened = _REASONING[name]
    fields = {"dialect": REASONING_DIALECTS[dialect], "tools": tools and TOOL_DIALECTS[tools], "opened": opened}
    return type(f"Baton_{name}", (ReasoningParser,), fields)


class ToolParserManager:
    @staticmethod
    def get_tool_parser(name: str) -> type[ToolParser]:
        return _tool_parser(_TOOL_NAMES[name])


class ReasoningParserManager:
    @staticmethod
    def get_reasoning_parser(name: str) -> type[ReasoningParser]:
        return _reasoning_parser(name)


# --- tokenizers ---


def _anchors() -> list[str]:
    """Return what the tokenizers of the families have as one token."""
    dialects = (*TOOL_DIALECTS.values(), *REASONING_DIALECTS.values())
    names = {name for dialect in dialects for name in dialect.anchors}
    bracketed = (name for name in names if name[:1] in ("<", "[") and name[-1] in (">", "]"))
    tokens = (name for name in bracketed if not set(name) & set('"\n='))
    return sorted({*tokens, "<|tool_call_argument_begin|>", "<｜tool▁sep｜>"})  # noqa: RUF001  DeepSeek's anchors


_ANCHORS = _anchors()


def _from_pretrained(*_: Any, **__: Any) -> Any:
    """Return a tokenizer in place of one of the hub's."""
    parts = json.loads(_TOKENIZER.read_bytes())
    backend = tokenizers.Tokenizer.from_str(json.dumps({**parts, "post_processor": None}))
    backend.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in _ANCHORS])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def detokenize_incrementally(
    *, tokenizer: Any, all_input_ids: Sequence[int], prefix_offset: int, read_offset: int, **_: Any
) -> tuple[list[str], str, int, int]:
    """Return the new token, its text, and offsets: that of the text that is known and that of the tokens."""
    text = tokenizer.decode(all_input_ids)
    if text.endswith("\ufffd"):
        return [str(all_input_ids[-1])], "", prefix_offset, read_offset
    return [str(all_input_ids[-1])], text[prefix_offset:], len(text), len(all_input_ids)


# --- a server ---


class RemoteOpenAIServer:
    """A deployment of Baton, which the test of this suite has started, in place of a server of vLLM's.

    Attributes:
        url_root: Address of its router.
    """

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = os.environ["BATON_URL"]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


class _Hub:
    """The hub, of which the server needs nothing."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return ""


# --- modules ---


class Missing:
    """Stands for what Baton has no counterpart of."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no counterpart in Baton")


_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (FunctionDefinition, ChatCompletionToolsParam, ChatCompletionRequest)},
    **{kind.__name__: kind for kind in (FunctionCall, ToolCall, ExtractedToolCallInformation, DeltaMessage)},
    **{kind.__name__: kind for kind in (DeltaFunctionCall, DeltaToolCall, ToolParserManager, ReasoningParserManager)},
    **{"ToolParser": ToolParser, "ReasoningParser": ReasoningParser, "TokenizerLike": Any},
    **{"get_tokenizer": _from_pretrained, "detokenize_incrementally": detokenize_incrementally},
    **{"is_mistral_tokenizer": lambda tokenizer: False, "hf_api": _Hub, "RemoteOpenAIServer": RemoteOpenAIServer},
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _NAMES:
            return _NAMES[name]
        if name in _TOOL_CLASSES:
            return _tool_parser(_TOOL_CLASSES[name])
        if name in _REASONING_CLASSES:
            return _reasoning_parser(_REASONING_CLASSES[name])
        return type(name, (Missing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages that are not there, and that of vLLM's tests which needs an engine."""

    _PACKAGES = ("vllm", "xgrammar", "partial_json_parser")
    _MODULES = ("tests.utils",)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._PACKAGES and fullname not in self._MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def _install() -> None:
    """Have the modules found, before the tests' ``conftest.py`` is imported."""
    sys.meta_path.insert(0, _Finder())
    transformers.AutoTokenizer.from_pretrained = _from_pretrained  # type: ignore[method-assign]
    utils: Any = importlib.import_module("tests.tool_parsers.utils")  # vLLM's
    original = utils.run_tool_extraction_streaming

    def run_to_the_end(tool_parser: Any, model_deltas: Any, *args: Any, **options: Any) -> Any:
        if isinstance(model_deltas, str):
            model_deltas = utils.split_string_into_token_deltas(tool_parser.model_tokenizer, model_deltas)

        def deltas() -> Iterator[str]:
            tool_parser.at_end = False
            yield from model_deltas
            tool_parser.at_end = True
            yield ""

        return original(tool_parser, deltas(), *args, **options)

    utils.run_tool_extraction_streaming = run_to_the_end


_OUTCOMES: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.when == "call" or report.skipped:
        _OUTCOMES[report.nodeid] = "failed" if report.failed else _OUTCOMES.get(report.nodeid, report.outcome)


def pytest_sessionfinish() -> None:
    Path(os.environ["BATON_OUTCOMES"]).write_text(json.dumps(_OUTCOMES))


_install()
