"""`python -m hf_linattn.bench`: the benchmark, whose parts are in `hf_linattn.eval.bench`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("hf_linattn.eval.bench", run_name="__main__", alter_sys=True)
