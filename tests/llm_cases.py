"""What the tests of the Python door and of the driver both ask: prompts, greedy parameters, and each prompt alone."""

from jaxinfer import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [
    "Once, on a river",
    "By day",
    "The night",
    "bell",
    "a 🙂 and 한국어",
    "one",
    "over full. One crossing carried",
]


def one_by_one(llm: LLM, prompts, params: SamplingParams) -> list[tuple[int, ...]]:
    return [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
