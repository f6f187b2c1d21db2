"""The section of docs/perplexity.md that compares patches: made of results, and in its place."""

import compare_docs

from hf_linattn.eval.common.markdown import between

ROWS = (
    ("softmax", 512, 20.0),
    ("softmax", 1024, 40.0),
    ("logn:kappa=0.2", 512, 30.0),
    ("logn:kappa=0.2", 1024, 1234.56),
)


def test_the_section_in_docs():
    rows = [{"model": m, "length": n, "perplexity": p, "tokens": 1024} for m, n, p in ROWS]
    results = {"rows": rows, "data": {"documents": 3}, "versions": {"torch": "2", "transformers": "5"}}
    lines = compare_docs.section(results, "softmax,logn:kappa=0.2").splitlines()
    assert "| entry | 512 | 1,024 |" in lines
    assert "| `logn:kappa=0.2` | 30.0 | 1,234.6 |" in lines
    assert "    --compare softmax,logn:kappa=0.2 \\" in lines
    assert between(compare_docs.PAGE, compare_docs.MARKS).startswith("\n\n```text\npython -m hf_linattn.eval")
