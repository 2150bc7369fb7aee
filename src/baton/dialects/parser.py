"""One incremental parser for all dialects: text in pieces becomes text, reasoning and tool calls.

However the text is cut, the events are the same when those of a kind that follow each other are put together; the
arguments of a call in one answer are those of its deltas. Text that looks like a call but is none stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.dialects.calls import SectionReader
from baton.dialects.events import Event, EventSink, Reasoning, Text
from baton.dialects.source import NotACallError, Reader, Source, beginning_at_end, literals_pattern
from baton.dialects.syntax import Channels, NamedCall, ReasoningDialect, Region, Section, ToolDialect
from baton.dialects.token_anchors import MARK, marked_text, unmarked_text

_MAX_HEADER = 512


@dataclass(frozen=True, slots=True)
class ChannelReader:
    """Reads messages with headers.

    Attributes:
        source: The text.
        sink: Collects the events.
        tools: Whether calls are calls; else they are text.
        reasoning: Whether reasoning is such; else it is text.
    """

    source: Source
    sink: EventSink
    tools: bool
    reasoning: bool

    def read(self, channels: Channels) -> Reader[None]:
        """Read messages up to the end of the text."""
        source = self.source
        kinds = set[type]()
        literal = yield from source.literal((*channels.first, *channels.begin))
        while True:
            if not literal:
                literal = yield from self.source.stream(channels.begin, self.sink.add_text)
                if not literal:
                    return
            begun = source.mark()
            try:
                rest, _ = yield from source.until((channels.message,), _MAX_HEADER)
                header = re.fullmatch(channels.header, literal + rest)
                if header is None:
                    raise NotACallError
            except NotACallError:
                source.seek(begun)
                self.sink.add_text(literal)
                literal = ""
                continue
            literal = yield from self._message(channels, header, kinds)
            if literal in channels.end:
                literal = ""

    def _message(self, channels: Channels, header: re.Match[str], kinds: set[type]) -> Reader[str]:
        """Read a message behind its header; return what ended it."""
        recipient = header["first"] or header["recipient"]
        stops = (*channels.end, *channels.begin)
        if recipient and self.tools:
            self.sink.start_call(recipient)
            empty = True

            def add_arguments(text: str) -> None:
                nonlocal empty
                empty = empty and not text
                self.sink.add_arguments(text)

            literal = yield from self.source.stream(stops, add_arguments)
            if empty:
                self.sink.add_arguments("{}")
            self.sink.end_call()
            return literal
        kind = Reasoning if self.reasoning and header["channel"] in channels.reasoning else Text
        self.sink.strip()
        if kind in kinds:
            self.sink.break_line(kind)
        kinds.add(kind)
        literal = yield from self.source.stream(
            stops, self.sink.add_reasoning if kind is Reasoning else self.sink.add_text
        )
        if kind is Reasoning:
            self.sink.strip()
        return literal


@dataclass(frozen=True, slots=True)
class RegionReader:
    """Reads regions.

    Attributes:
        source: The text.
        sink: Collects the events.
        schemas: Schemas of parameters, by the names of tools.
    """

    source: Source
    sink: EventSink
    schemas: Mapping[str, Any]

    def read(self, regions: tuple[Region, ...], prompt: str) -> Reader[None]:
        """Read regions and what is between them up to the end of the text.

        Args:
            regions: All there are.
            prompt: The part of the prompt that the answer goes on from.
        """
        source = self.source
        begun = True
        region, match = _open_at_end(regions, prompt)
        while True:
            if region is None or match is None:
                region, match, hold = _first_open(regions, source, begun=begun)
                if region is None or match is None:
                    if hold > source.at:
                        self.sink.add_text(source.text[source.at : hold])
                        source.at = hold
                        begun = False
                    if source.ended:
                        return
                    if hold == len(source.text):
                        source.drop()
                    yield
                    continue
                self.sink.add_text(source.text[source.at : match.start()])
                source.at = match.end()
            begun = False
            yield from self._region(region, match, _tokens_of_calls(regions))
            region = match = None

    def _region(self, region: Region, match: re.Match[str], calls: tuple[str, ...]) -> Reader[None]:
        """Read a region behind its beginning.

        Args:
            region: The region.
            match: Match of the region's beginning.
            calls: Tokens that begin calls, which end reasoning, too.
        """
        source = self.source
        if region.kind == "calls":
            held: list[str] = []
            closed = yield from self._up_to_close(region, held.append)
            groups = {name: unmarked_text(text) for name, text in match.groupdict("").items()}
            converted = region.convert(unmarked_text("".join(held)), groups, self.schemas) if region.convert else None
            if converted is None:
                self.sink.add_text(match[0] + "".join(held) + closed)
            for name, arguments in converted or ():
                self.sink.start_call(name)
                self.sink.add_arguments(arguments)
                self.sink.end_call()
            return
        if region.strip:
            yield from source.space()
        if region.kind == "reasoning":
            self.sink.strip()
            literal = yield from self._up_to_close(region, self.sink.add_reasoning, calls)
            if literal in calls:
                source.at -= len(literal)
                self.sink.keep_space()
                return
        else:
            yield from self._up_to_close(region, self.sink.add_text)
        if region.strip:
            self.sink.strip()
            yield from source.space()
        elif region.kind == "reasoning":
            self.sink.keep_space()

    def _up_to_close(self, region: Region, on_text: Callable[[str], None], others: tuple[str, ...] = ()) -> Reader[str]:
        """Hand a region's text on and return what closed it, or one of others; nothing at the end of the text."""
        source = self.source
        if region.close is None or region.close_literals:
            return (yield from self.source.stream((*region.close_literals, *others), on_text))
        while True:
            match = region.close.search(source.text, source.at)
            if match is not None and (match.end() < len(source.text) or source.ended):
                on_text(source.text[source.at : match.start()])
                source.at = match.end()
                return match[0]
            if source.ended:
                on_text(source.text[source.at :])
                source.at = len(source.text)
                return ""
            yield


def _tokens_of_calls(regions: tuple[Region, ...]) -> tuple[str, ...]:
    calls = (region.literals for region in regions if region.kind == "calls")
    return tuple(literal for literals in calls for literal in literals if literal.startswith(MARK))


def _open_at_end(regions: tuple[Region, ...], prompt: str) -> tuple[Region, re.Match[str]] | tuple[None, None]:
    """Return the region that the beginning of the answer, which stands in the prompt, leaves open."""
    source = Source()
    source.push(prompt)
    source.ended = True
    while True:
        region, match, _ = _first_open(regions, source, begun=False)
        if region is None or match is None:
            return None, None
        closed = None if region.close is None else region.close.search(prompt, match.end())
        if closed is None:
            return region, match
        source.at = max(closed.end(), match.end())


def _first_open(
    regions: tuple[Region, ...], source: Source, *, begun: bool
) -> tuple[Region | None, re.Match[str] | None, int]:
    """Return the first region that surely begins, and up to where the text surely is none.

    Args:
        regions: All there are.
        source: The text.
        begun: Whether this is where the answer begins; only there a region may begin with nothing.
    """
    text = source.text
    at = source.at
    hold = len(text)
    best = None
    for region in regions:
        match = region.open.search(text, at)
        while match is not None and match.start() == match.end() and not (begun and match.start() == at and text):
            match = region.open.search(text, match.end() + 1) if match.end() < len(text) else None
        if match is not None and not (region.exact or source.ended or match.end() < len(text)):
            hold = min(hold, match.start())
            match = None
        if match is not None and (best is None or match.start() < best[1].start()):
            best = region, match
        if source.ended:
            continue
        partial = beginning_at_end(region.literals, text, at)
        if partial is not None:
            hold = min(hold, partial)
        if not region.exact:
            before = literals_pattern(region.literals).search(text, at) if region.literals else None
            if before is not None or not region.literals:
                hold = min(hold, at if before is None else before.start())
    if best is None or best[1].start() > hold:
        return None, None, hold
    return *best, hold


MAX_REREAD = 2_000_000
"""Most characters read again after failed attempts to read calls, about a tenth of a second; the rest is text."""


class DialectParser:
    """Parses one answer.

    Args:
        tools: How the model calls tools, with the marks of :class:`~baton.dialects.token_anchors.TokenAnchors` where
            anchors are tokens; ``None``: what looks like calls is text.
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
        self._tools = tools
        self._reasoning = reasoning
        self._prompt = prompt
        self._source = Source()
        self._sink = EventSink("random" if tools is None else tools.ids)
        self._schemas = schemas or {}
        self.plain = False
        self._sections = SectionReader(self._source, self._sink, self._schemas)
        self._run: Generator[None, None, None] = self._answer()
        next(self._run)

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._sink.calls

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text are in no event yet: they may belong to a mark, or be dropped."""
        return len(unmarked_text(self._source.text[self._source.at :])) + self._sink.num_held

    def feed(self, text: str, anchors: Sequence[int] = ()) -> list[Event]:
        """Add text; return the events that are certain now.

        Args:
            text: The text.
            anchors: Places in it where tokens begin that the dialects consist of.
        """
        if text:
            self._source.push(marked_text(text, anchors))
            next(self._run)
        return self._sink.drain()

    def finish(self) -> list[Event]:
        """End the text; return the remaining events."""
        if not self._source.ended:
            self._source.ended = True
            for _ in self._run:
                raise AssertionError("a reader waits for text behind the end")
            self._sink.finish()
        return self._sink.drain()

    def _answer(self) -> Reader[None]:
        yield  # until there is text
        tools = self._tools
        reasoning = self._reasoning
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
        closers: tuple[str, ...] = ()
        if reasoning is not None and reasoning.begin:
            mark = self._source.mark()
            yield from self._source.space()
            begun = yield from self._source.literal((reasoning.begin,))
            if begun or reasoning.is_open(self._prompt):
                closers = yield from self._think(reasoning.end)
            else:
                self._source.seek(mark)
        if self._tools is None:
            self.plain = True
            self._sink.keep_all()
        sections = self._tools.sections if self._tools is not None else ()
        bare = [section for section in sections if section.bare]
        if bare and not self._sink.calls:
            yield from self._begin_bare(bare)
        yield from self._scan({begin: section for section in sections for begin in _openers(section)}, closers)

    def _think(self, end: str) -> Reader[tuple[str, ...]]:
        """Read reasoning up to its end, and the white space behind that.

        The beginning of a section is an end, too: models forget the usual one. Spelled in characters, it must be that
        of a call.

        Returns:
            What may still end a section that ended the reasoning.
        """
        tools = self._tools
        openers = {begin: section for section in tools.sections for begin in section.begin} if tools is not None else {}
        yield from self._source.space()
        while True:
            literal = yield from self._source.stream((end, *openers), self._sink.add_reasoning)
            if literal == end or not literal:
                self._sink.strip()
                yield from self._source.space()
                return ()
            self._sink.keep_space()
            if MARK in literal:
                self._source.at -= len(literal)
                return ()
            calls = self._sink.calls
            closers = yield from self._section(openers[literal], literal, self._sink.add_reasoning)
            if self._sink.calls > calls:
                return closers or ()
            if self._source.num_reread > MAX_REREAD:
                openers = {}

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

    def _scan(self, openers: Mapping[str, Section], closers: tuple[str, ...]) -> Reader[None]:
        """Read text with sections in it up to the end.

        Args:
            openers: Sections by the literals that begin one.
            closers: Literals that may still end a section that was left before its end.
        """
        source = self._source
        while True:
            literal = yield from self._source.stream((*openers, *closers), self._sink.add_text)
            if not literal:
                return
            if literal not in openers:
                closers = ()
                continue
            left = yield from self._section(openers[literal], literal, self._sink.add_text)
            closers = closers if left is None else left
            if source.num_reread > MAX_REREAD:  # the answer was made to look so
                yield from source.stream((), self._sink.add_text)
                return

    def _section(
        self, section: Section, literal: str, on_text: Callable[[str], None]
    ) -> Reader[tuple[str, ...] | None]:
        """Read a section behind what begins it.

        Args:
            section: The section.
            literal: The literal that began the section.
            on_text: Takes ``literal``, if no call follows it.

        Returns:
            What may still end it; ``None``: it is none.
        """
        source = self._source
        mark = source.mark()
        calls = self._sink.calls
        own = literal not in section.begin
        if own:  # a call without a section around it
            source.at -= len(literal)
        try:
            ended = yield from self._sections.read(section, bare=own)
        except NotACallError:
            if self._sink.calls == calls:
                on_text(literal)
                source.seek(mark)
            return None
        return () if ended else section.end


def _openers(section: Section) -> tuple[str, ...]:
    begins = section.begin
    if section.bare:
        begins += tuple(call.begin for call in section.calls if isinstance(call, NamedCall) and call.begin)
    return begins
