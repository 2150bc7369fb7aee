"""One incremental parser for all dialects: text in pieces becomes text, reasoning and tool calls.

However the text is cut, the events are the same when those of a kind that follow each other are put together; the
arguments of a call in one answer are those of its deltas. Text that looks like a call but is none stays text.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from baton.dialects.calls import SectionReader
from baton.dialects.events import Event, EventSink
from baton.dialects.messages import ChannelReader, RegionReader
from baton.dialects.source import NotACallError, Reader, Source
from baton.dialects.syntax import NamedCall, ReasoningDialect, Section, ToolDialect

MAX_IN_VAIN = 2_000_000
"""Characters that may be read in vain, about a tenth of a second; what comes then is text."""


class DialectParser:
    """Parses one answer.

    Args:
        tools: How the model calls tools; ``None``: what looks like calls is text.
        reasoning: How it sets its reasoning apart; ``None``: it is text.
        schemas: The schemas of parameters, by the names of the tools that were offered.
        prompt: The end of the prompt, which may open the reasoning.

    Attributes:
        plain: Whether all that comes is text as it stands, so that there is nothing to parse any more.
    """

    def __init__(
        self,
        tools: ToolDialect | None,
        reasoning: ReasoningDialect | None = None,
        *,
        schemas: Mapping[str, Any] | None = None,
        prompt: str = "",
    ) -> None:
        self._tools, self._reasoning, self._prompt = tools, reasoning, prompt
        self._source, self._sink = Source(), EventSink("random" if tools is None else tools.ids)
        self._schemas = schemas or {}
        self.plain = False
        self._sections = SectionReader(self._source, self._sink, self._schemas)
        self._run: Generator[None, None, None] = self._answer()
        next(self._run)

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._sink.calls

    def feed(self, text: str) -> list[Event]:
        """Take more text; return what is certain now."""
        if text:
            self._source.push(text)
            next(self._run)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """Return what is left: no more text comes."""
        if not self._source.ended:
            self._source.ended = True
            for _ in self._run:
                raise AssertionError("a reader waits for text behind the end")
            self._sink.finish()
        return self._sink.take()

    def _answer(self) -> Reader[None]:
        yield  # until there is text
        tools, reasoning = self._tools, self._reasoning
        channels = (tools and tools.channels) or (reasoning and reasoning.channels)
        own = tools if tools is not None and tools.regions else reasoning
        if channels:
            reader = ChannelReader(
                self._source, self._sink, tools=tools is not None, reasoning=bool(reasoning and reasoning.channels)
            )
            yield from reader.read(channels)
        elif own is not None and own.regions:
            last = 0
            for match in own.start.finditer(self._prompt) if own.start else ():
                last = match.end()
            reader_of_regions = RegionReader(self._source, self._sink, self._schemas)
            yield from reader_of_regions.read(own.regions, self._prompt[last:] if last else "")
        else:
            yield from self._plain()

    def _plain(self) -> Reader[None]:
        reasoning = self._reasoning
        if reasoning is not None and reasoning.begin:
            mark = self._source.mark()
            yield from self._source.space()
            begun = yield from self._source.literal((reasoning.begin,))
            if begun or reasoning.is_open(self._prompt):
                yield from self._think(reasoning.end)
            else:
                self._source.seek(mark)
        if self._tools is None:
            self.plain = True
            self._sink.keep_all()
        sections = self._tools.sections if self._tools is not None else ()
        bare = [section for section in sections if section.bare]
        if bare:
            yield from self._begin_bare(bare)
        openers = {begin: section for section in sections for begin in _openers(section)}
        yield from self._scan(tuple(openers), openers)

    def _think(self, end: str) -> Reader[None]:
        """Read reasoning up to its end, and the white space behind that."""
        tools = self._tools
        ends: tuple[str, ...] = (end,)
        if tools is not None and tools.ends_reasoning:
            ends += tuple(begin for section in tools.sections for begin in section.begin)
        yield from self._source.space()
        found = yield from self._source.stream(ends, self._sink.reasoning)
        self._sink.strip()
        if found == end:
            yield from self._source.space()
        elif found:
            self._source.at -= len(found)

    def _begin_bare(self, sections: list[Section]) -> Reader[None]:
        """Read calls that the message may begin with."""
        source = self._source
        mark = source.mark()
        yield from source.space()
        for section in sections:
            begun = source.mark()
            calls = self._sink.calls
            try:
                yield from self._sections.read(section, bare=True)
            except NotACallError:
                source.seek(begun)
            if self._sink.calls > calls:
                return
        source.seek(mark)

    def _scan(self, anchors: tuple[str, ...], openers: Mapping[str, Section]) -> Reader[None]:
        """Read text with sections in it up to the end."""
        source = self._source
        closers: tuple[str, ...] = ()
        while True:
            found = yield from self._source.stream((*anchors, *closers), self._sink.text)
            if not found:
                return
            if found not in openers:  # what ends a section that was left before its end
                closers = ()
                continue
            section = openers[found]
            mark = source.mark()
            calls = self._sink.calls
            own = found not in section.begin
            if own:  # a call without a section around it
                source.at -= len(found)
            try:
                ended = yield from self._sections.read(section, bare=own)
            except NotACallError:
                if self._sink.calls == calls:
                    self._sink.text(found)
                    source.seek(mark)
                if source.in_vain > MAX_IN_VAIN:  # the answer was made to look so
                    yield from source.stream((), self._sink.text)
                    return
            else:
                closers = () if ended else section.end


def _openers(section: Section) -> tuple[str, ...]:
    begins = section.begin
    if section.bare:
        begins += tuple(call.begin for call in section.calls if isinstance(call, NamedCall) and call.begin)
    return begins
