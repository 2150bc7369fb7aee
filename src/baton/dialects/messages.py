"""Reads answers that are made of messages with headers, or of the regions of a tokenizer's own template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.dialects.events import EventSink, Reasoning, Text
from baton.dialects.source import NotACallError, Reader, Source, beginning_at_end, literals_pattern
from baton.dialects.syntax import Channels, Region

_MAX_HEADER = 512


class ChannelReader:
    """Reads messages with headers.

    Args:
        source: Where they stand.
        sink: Takes what is in them.
        tools: Whether calls are calls; else they are text.
        reasoning: Whether reasoning is such; else it is text.
    """

    __slots__ = ("_reasoning", "_sink", "_source", "_tools")

    def __init__(self, source: Source, sink: EventSink, *, tools: bool, reasoning: bool) -> None:
        self._source, self._sink, self._tools, self._reasoning = source, sink, tools, reasoning

    def read(self, channels: Channels) -> Reader[None]:
        """Read messages up to the end of the text."""
        source, kinds = self._source, set[type]()
        found = yield from source.literal((*channels.first, *channels.begin))
        while True:
            if not found:
                found = yield from self._source.stream(channels.begin, self._sink.text)
                if not found:
                    return
            begun = source.mark()
            try:
                rest, _ = yield from source.until((channels.message,), _MAX_HEADER)
                header = re.fullmatch(channels.header, found + rest)
                if header is None:
                    raise NotACallError
            except NotACallError:
                source.seek(begun)
                self._sink.text(found)
                found = ""
                continue
            found = yield from self._message(channels, header, kinds)
            if found in channels.end:
                found = ""

    def _message(self, channels: Channels, header: re.Match[str], kinds: set[type]) -> Reader[str]:
        """Read a message behind its header; return what ended it."""
        recipient = header["first"] or header["recipient"]
        stops = (*channels.end, *channels.begin)
        if recipient and self._tools:
            self._sink.start(recipient)
            empty = True

            def take(text: str) -> None:
                nonlocal empty
                empty = empty and not text
                self._sink.arguments(text)

            found = yield from self._source.stream(stops, take)
            if empty:
                self._sink.arguments("{}")
            self._sink.end()
            return found
        kind = Reasoning if self._reasoning and header["channel"] in channels.reasoning else Text
        self._sink.strip()
        if kind in kinds:
            self._sink.break_line(kind)
        kinds.add(kind)
        found = yield from self._source.stream(stops, self._sink.reasoning if kind is Reasoning else self._sink.text)
        if kind is Reasoning:
            self._sink.strip()
        return found


class RegionReader:
    """Reads regions.

    Args:
        source: Where they stand.
        sink: Takes what is in them.
        schemas: Schemas of parameters, by the names of tools.
    """

    __slots__ = ("_schemas", "_sink", "_source")

    def __init__(self, source: Source, sink: EventSink, schemas: Mapping[str, Any]) -> None:
        self._source, self._sink, self._schemas = source, sink, schemas

    def read(self, regions: tuple[Region, ...], prompt: str) -> Reader[None]:
        """Read regions and what is between them up to the end of the text.

        Args:
            regions: All there are.
            prompt: The part of the prompt that the answer goes on from.
        """
        source, begun = self._source, True
        region, match = _open_at_end(regions, prompt)
        while True:
            if region is None or match is None:
                region, match, hold = _first_open(regions, source, begun=begun)
                if region is None or match is None:
                    if hold > source.at:
                        self._sink.text(source.text[source.at : hold])
                        source.at, begun = hold, False
                    if source.ended:
                        return
                    if hold == len(source.text):
                        source.drop()
                    yield
                    continue
                self._sink.text(source.text[source.at : match.start()])
                source.at = match.end()
            begun = False
            yield from self._region(region, match)
            region = match = None

    def _region(self, region: Region, match: re.Match[str]) -> Reader[None]:
        """Read a region behind its beginning."""
        source = self._source
        if region.kind == "calls":
            held: list[str] = []
            closed = yield from self._up_to_close(region, held.append)
            calls = region.convert("".join(held), match.groupdict(""), self._schemas) if region.convert else None
            if calls is None:
                self._sink.text(match[0] + "".join(held) + closed)
            for name, arguments in calls or ():
                self._sink.start(name)
                self._sink.arguments(arguments)
                self._sink.end()
            return
        if region.strip:
            yield from source.space()
        if region.kind == "reasoning":
            self._sink.strip()
            yield from self._up_to_close(region, self._sink.reasoning)
        else:
            yield from self._up_to_close(region, self._sink.text)
        if region.strip:
            self._sink.strip()
            yield from source.space()
        elif region.kind == "reasoning":
            self._sink.keep_space()

    def _up_to_close(self, region: Region, take: Callable[[str], None]) -> Reader[str]:
        """Hand a region's text on and return what closed it; nothing at the end of the text."""
        source = self._source
        if region.close is None or region.close_literals:
            return (yield from self._source.stream(region.close_literals, take))
        while True:
            match = region.close.search(source.text, source.at)
            if match is not None and (match.end() < len(source.text) or source.ended):
                take(source.text[source.at : match.start()])
                source.at = match.end()
                return match[0]
            if source.ended:
                take(source.text[source.at :])
                source.at = len(source.text)
                return ""
            yield


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
    text, at = source.text, source.at
    hold, best = len(text), None
    for region in regions:
        match = region.open.search(text, at)
        while match is not None and match.start() == match.end() and not (begun and match.start() == at and text):
            match = region.open.search(text, match.end() + 1) if match.end() < len(text) else None
        if match is not None and not (region.exact or source.ended or match.end() < len(text)):
            hold, match = min(hold, match.start()), None
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
