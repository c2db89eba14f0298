"""`verl-tlt` as a user calls it."""

from typer.testing import CliRunner

from verl_tlt.commands.cli import app


def cli(*words):
    """(exit status, output) of a command with these words; an error that no user is meant to see is raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400", "TERM": "dumb"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output
