"""A model that can chat, which the tests' checkpoint alone cannot."""

from dataclasses import replace

import pytest

from jaxinfer import LLM
from jaxinfer.text.chat import ChatTemplate

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[answer]"


@pytest.fixture
def llm(fresh_llm: LLM) -> LLM:
    """`fresh_llm` with a chat template."""
    assembly = fresh_llm.assembly
    return LLM(replace(assembly, chat=ChatTemplate(TEMPLATE, assembly.tokenizer)))
