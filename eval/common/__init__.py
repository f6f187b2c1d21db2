"""What the evaluation commands share: options, models, text, results, tables and figures.

A command NAME is a folder with four files, some 120 lines before its arithmetic:

`__main__.py`
    `build_parser` (`add_model_arguments`, `add_text_arguments`, `add_output_arguments` and its own options),
    an epilog with examples, and `main`, which is one call of `run_command`.
`measure.py`
    the arithmetic, as a function of a model in memory that users can import.
`run.py`
    `run(arguments, command)`: a `ResumableRun` that asks `measure.py` for each row that is missing:

        run = ResumableRun(args.output_dir, recorded(args), "hf_linattn.NAME/1", command)
        if not run.complete:
            run.begin({"models": ...})
            for length in lengths_without(run.rows):
                with run.timed(str(length)):
                    run.rows.append(measure(model, length))
                run.save()
            run.finish("results.csv", COLUMNS)
        return run.results
`plot.py`
    pictures, and tables as text (`formatting.text_table`).

Importing `__main__.py` must not load datasets, accelerate or the training loop: `--help` is asked often.
"""
