from jaxinfer.request import SamplingParams
from jaxinfer.scheduler.loop import EngineLoop

from .scripted import LIMITS, ScriptedRunner, make_request, prompt, solo


def test_smoke():
    r = ScriptedRunner()
    loop = EngineLoop(r, queue=100, prefix_cache=True)
    reqs = [
        make_request(
            f"r{i}",
            i,
            prompt(1 + (7 * i) % 40, i % 3),
            params=SamplingParams(
                max_tokens=1 + i % 11, n=1 + i % 3, min_tokens=1 + i % 2 if i % 11 else 0, presence_penalty=i % 2
            ),
            stop_ids=frozenset({1, 2}),
        )
        for i in range(40)
    ]
    got = {}
    for q in reqs:
        loop.add(r.expect(q))
    ends = {}
    while loop.busy:
        for e in loop.step():
            got.setdefault((e.request_id, e.choice), []).extend(t.token for t in e.tokens)
            if e.finish:
                ends[e.request_id, e.choice] = e
        loop.check()
    for q in reqs:
        for c in range(q.params.n):
            out, fin = solo(q, LIMITS, c)
            assert (got[q.id, c], ends[q.id, c].finish) == (out, fin)
