"""Answers as models write them, in every dialect, after the models' public documentation and chat templates."""

# ruff: noqa: RUF001  DeepSeek's anchors have fullwidth bars in them

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "hours": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
    "get_time": {"type": "object", "properties": {}},
}
_WEATHER = {"city": "San Francisco, CA", "days": 3}
_FILE = {"path": "a.py", "content": 'def f(x):\n    return {"a": x}  # </tag> "quoted"\n'}


@dataclass(frozen=True)
class Sample:
    """An answer, and what is in it."""

    dialect: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str = ""
    reasoning: str = ""
    reasoning_dialect: str = "none"
    prompt: str = ""


def _kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


_JSON = '{"city": "San Francisco, CA", "days": 3}'
_JSON_FILE = r'{"path": "a.py", "content": "def f(x):\n    return {\"a\": x}  # </tag> \"quoted\"\n"}'
_RAW_FILE = 'def f(x):\n    return {"a": x}  # </tag> "quoted"\n'
_TWO = (("get_weather", _WEATHER), ("get_time", {}))
_DSML_BEGIN, _DSML_END = "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"

SAMPLES = (
    Sample("hermes", "Hello there.\n", content="Hello there.\n"),
    Sample(
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": ' + _JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        _TWO,
        "Let me look.",
    ),
    Sample(
        "hermes",
        '<think>\nThe user wants the weather.\n</think>\n\n<tool_call>\n{"name": "write_file", "arguments": '
        + _JSON_FILE
        + "}\n</tool_call>",
        (("write_file", _FILE),),
        reasoning="The user wants the weather.",
        reasoning_dialect="think",
    ),
    Sample(
        "hermes",
        "Short thought.\n</think>\n\nDone.",
        content="Done.",
        reasoning="Short thought.",
        reasoning_dialect="think",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Sample("hermes", "</think> alone", content="</think> alone", reasoning_dialect="think"),
    Sample(
        "hermes",
        "I think so.</think>Yes.",
        content="Yes.",
        reasoning="I think so.",
        reasoning_dialect="deepseek_r1",
    ),
    Sample(
        "hermes",
        'Write <tool_call> before a call, as in <tool_call>{"name": ...}</tool_call>.',
        content='Write <tool_call> before a call, as in <tool_call>{"name": ...}</tool_call>.',
    ),
    Sample(
        "hermes",
        '<tool_call>{"arguments": ' + _JSON + ', "name": "get_weather"}</tool_call>',
        (("get_weather", _WEATHER),),
    ),
    Sample("hermes", '<tool_call>{"name": "get_time"}</tool_call> and more', (("get_time", {}),), " and more"),
    Sample(
        "hermes",
        r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}</tool_call>',
        (("get_weather", {"city": "Rome"}),),
    ),
    Sample(
        "llama3_json",
        '{"name": "get_weather", "parameters": ' + _JSON + '}; {"name": "get_time", "parameters": {}}',
        _TWO,
    ),
    Sample("llama3_json", '<|python_tag|>{"name": "get_time", "parameters": {}}', (("get_time", {}),)),
    Sample("llama3_json", '{"name": "Bob", "parameters": {}}', content='{"name": "Bob", "parameters": {}}'),
    Sample("llama3_json", '{"answer": 42}', content='{"answer": 42}'),
    Sample("pythonic", '[get_weather(city="San Francisco, CA", days=3), get_time()]', _TWO),
    Sample(
        "pythonic",
        "[get_weather('Rome', hours=[1, -2], metric=True)]",
        (("get_weather", {"city": "Rome", "hours": [1, -2], "metric": True}),),
    ),
    Sample(
        "pythonic",
        "[get_time(from='a', is_=[1, 2] , x-y=\"b=c, d=e\")]",
        (("get_time", {"from": "a", "is_": [1, 2], "x-y": "b=c, d=e"}),),
    ),
    Sample("pythonic", "<|python_start|>[get_time()]<|python_end|>", (("get_time", {}),)),
    Sample(
        "pythonic",
        '<function_calls>\nget_weather(city="San Francisco, CA", days=3)\nget_time()\n</function_calls>',
        _TWO,
    ),
    Sample(
        "pythonic", "[1, 2] is a list, and [get_time() is not.", content="[1, 2] is a list, and [get_time() is not."
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + _JSON + '}, {"name": "get_time", "arguments": {}}]',
        _TWO,
    ),
    Sample("mistral", f"Sure.[TOOL_CALLS]get_weather[ARGS]{_JSON}[TOOL_CALLS]get_time[ARGS]" + "{}", _TWO, "Sure."),
    Sample("mistral", "[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{}", (("get_time", {}),)),
    Sample(
        "mistral",
        "[THINK]Well.[/THINK]It is late.",
        content="It is late.",
        reasoning="Well.",
        reasoning_dialect="mistral",
    ),
    Sample(
        "qwen3_coder",
        "I will write it.\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\n" + _RAW_FILE + "\n</parameter>\n</function>\n</tool_call>",
        (("write_file", _FILE),),
        "I will write it.",
    ),
    Sample(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        (("get_weather", {"city": "Rome", "days": 3, "metric": True, "hours": [1, 2]}),),
    ),
    Sample("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", (("get_time", {}),)),
    Sample(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", _JSON)
        + "\n"
        + _V3.format("get_time", "{}")
        + "<｜tool▁calls▁end｜>",
        _TWO,
    ),
    Sample(
        "deepseek_v3.1",
        f"One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        _TWO,
        "One moment.",
    ),
    Sample(
        "deepseek_v3.2",
        "Need it.</think>Looking.\n\n" + _DSML_BEGIN + '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">San Francisco, CA</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n' + _DSML_END,
        _TWO,
        "Looking.",
        "Need it.",
        "think",
        "<｜Assistant｜><think>",
    ),
    Sample(
        "glm4",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>San Francisco, CA</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        _TWO,
    ),
    Sample(
        "glm4",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>San Francisco, CA</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>get_time</tool_call>",
        _TWO,
    ),
    Sample("kimi_k2", "I check." + _kimi(("get_weather", _JSON), ("get_time", "{}")), _TWO, "I check."),
    Sample(
        "kimi_k2",
        "<think>Hm." + _kimi(("get_time", "{}")),
        (("get_time", {}),),
        reasoning="Hm.",
        reasoning_dialect="think",
    ),
    Sample(
        "minimax_m2",
        '<think>\nOk.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
        'San Francisco, CA</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n'
        "</invoke>\n</minimax:tool_call>",
        _TWO,
        reasoning="Ok.",
        reasoning_dialect="think",
    ),
    Sample(
        "gpt_oss",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I will check.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{_JSON}<|call|>",
        (("get_weather", _WEATHER),),
        "I will check.",
        "Need the weather.",
        "gpt_oss",
    ),
    Sample(
        "gpt_oss",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        content="2 + 2 = 4.",
        reasoning="Easy.",
        reasoning_dialect="gpt_oss",
    ),
    Sample(
        "gpt_oss",
        " to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>",
        (("get_time", {}),),
        reasoning_dialect="gpt_oss",
    ),
    Sample(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": ' + _JSON + '}, {"name": "get_time", "arguments": {}}]',
        _TWO,
    ),
    Sample(
        "granite",
        '<tool_call>\n{"name": "get_weather", "arguments": ' + _JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        _TWO,
    ),
)

IRREGULAR_SAMPLES = (
    # Calls within reasoning that was not closed.
    Sample(
        "hermes",
        '<think>\nI look.\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\nDone.',
        (("get_time", {}),),
        "\nDone.",
        "I look.\n\n",
        "think",
    ),
    Sample(
        "hermes",
        "<think>First <tool_call> and a name, then </tool_call>.</think>Yes.",
        content="Yes.",
        reasoning="First <tool_call> and a name, then </tool_call>.",
        reasoning_dialect="think",
    ),
    Sample(
        "qwen3_coder",
        "I read it.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        (("get_time", {}), ("get_time", {})),
        reasoning="I read it.\n\n",
        reasoning_dialect="think",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Sample(
        "glm4",
        "<think>Hm.<tool_call>get_time</tool_call>",
        (("get_time", {}),),
        reasoning="Hm.",
        reasoning_dialect="think",
    ),
    Sample(
        "minimax_m2",
        'Hm.\n<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        (("get_time", {}),),
        reasoning="Hm.\n",
        reasoning_dialect="think",
        prompt="]~b]ai\n<think>\n",
    ),
    Sample(
        "mistral",
        "[THINK]Hm.[TOOL_CALLS]get_time[ARGS]{}",
        (("get_time", {}),),
        reasoning="Hm.",
        reasoning_dialect="mistral",
    ),
    Sample(
        "deepseek_v3.1",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("get_time", {}),),
        reasoning="Hm.",
        reasoning_dialect="think",
        prompt="<｜Assistant｜><think>",
    ),
    # Calls that are not written as they should be.
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nSan Francisco, CA\n<parameter=days>\n3\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        _TWO,
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.md\n</parameter>\n<parameter=content>\n"
        "Write <function=f>\n<parameter=path>\nx\n</function>, or\n<parameter=other>.\n</parameter>\n"
        "</function>\n</tool_call>",
        (
            (
                "write_file",
                {
                    "path": "a.md",
                    "content": "Write <function=f>\n<parameter=path>\nx\n</function>, or\n<parameter=other>.",
                },
            ),
        ),
    ),
    Sample(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">San Francisco, CA'
        '<parameter name="days">3</invoke>\n</minimax:tool_call>',
        (("get_weather", _WEATHER),),
    ),
    Sample(
        "deepseek_v3.2",
        _DSML_BEGIN + '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="false">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hours" string="true">[1, 2]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n' + _DSML_END,
        (("get_weather", {"city": "5", "days": 3, "hours": [1, 2], "other": "3"}),),
    ),
)

QWEN_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
CODER_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
COMMAND_TEMPLATE = {
    "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}

TEMPLATE_SAMPLES = (
    (
        QWEN_TEMPLATE,
        Sample(
            "template",
            'Hm.\n</think>\n\nSure.\n<tool_call>\n{"name": "get_weather", "arguments": ' + _JSON + "}\n</tool_call>\n"
            '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>',
            _TWO,
            "Sure.",
            "Hm.",
            prompt="<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
    ),
    (QWEN_TEMPLATE, Sample("template", "Plain.<|im_end|>", content="Plain.")),
    (
        QWEN_TEMPLATE,
        Sample(
            "template",
            "Such: <tool_call>no JSON</tool_call> it is.",
            content="Such: <tool_call>no JSON</tool_call> it is.",
        ),
    ),
    (
        CODER_TEMPLATE,
        Sample(
            "template",
            "<think>Hm.</think>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan Francisco, CA\n"
            "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n"
            "</tool_call>",
            _TWO,
            reasoning="Hm.",
        ),
    ),
    (
        COMMAND_TEMPLATE,
        Sample(
            "template",
            '<|START_THINKING|>Call it.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
            '"get_weather", "parameters": ' + _JSON + '},\n {"tool_call_id": "1", "tool_name": "get_time", '
            '"parameters": {}}\n]<|END_ACTION|>',
            _TWO,
            reasoning="Call it.",
        ),
    ),
    (
        COMMAND_TEMPLATE,
        Sample("template", "<|START_RESPONSE|>It is late.<|END_RESPONSE|>", content="It is late."),
    ),
)
