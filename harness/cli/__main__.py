"""``python -m harness.cli``, the console script ``harness``, and what every other ``__main__`` calls."""

from harness.system.import_path import leave_out_current_folder

leave_out_current_folder()  # before anything else is imported, which a module of that folder could stand in for


def main(name: str | None = None) -> None:
    """Run the command ``harness`` with its subcommands, or one of them as a program of its own."""
    from harness.cli.commands import run

    run(name)


if __name__ == "__main__":  # a worker process that multiprocessing spawns imports this file too
    main()
