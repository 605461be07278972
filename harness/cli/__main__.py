"""``python -m harness.cli``, and the console script ``harness``."""

from harness.system.import_path import leave_out_current_folder

leave_out_current_folder()  # before anything else is imported, which a module of that folder could stand in for


def main() -> None:
    """Run the console script ``harness``."""
    from harness.cli.commands import main as run_command_line

    run_command_line()


if __name__ == "__main__":  # a worker process that multiprocessing spawns imports this file too
    main()
