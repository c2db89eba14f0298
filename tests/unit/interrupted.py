"""The program of a demo run that a test interrupts."""

import textwrap


def interruptible_run(recipe, out, before=""):
    """A program that runs `recipe` as the demo does, after `before`."""
    return textwrap.dedent(f"""
        from pathlib import Path
        from verl_tlt.commands import processes
        from demo.run import DemoRun, run_recipe
        from verl_tlt.commands.processes import interruptible
        from demo.screen import Screen
        from verl_tlt.commands.console import make_console
        with interruptible(), Screen(make_console()) as screen:
            {before}
            run_recipe(DemoRun("a run", Path({str(out)!r}), steps=1, seed=0), Path({str(recipe)!r}), screen)
    """)
