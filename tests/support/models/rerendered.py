"""The demo model with a chat template that renders answers as history otherwise than it began them.

As Qwen3's does without thinking: the prompt ends with an empty thought, which history does not have.
"""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).resolve().parents[3] / "models" / "baton-tiny"
_NAME = "chat_template.jinja"
_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\nthinking: nothing\\n\\n' }}
{%- endif %}
"""


def link_rerendered_model(folder: Path) -> None:
    """Put the model into an empty folder."""
    for file in MODEL.iterdir():
        if file.name != _NAME:
            (folder / file.name).symlink_to(file)
    (folder / _NAME).write_text(_TEMPLATE)
