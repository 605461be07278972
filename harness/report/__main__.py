"""``python -m harness.report RUN_FOLDER``."""

from harness.system.import_path import leave_out_current_folder

leave_out_current_folder()  # before anything else is imported, which a module of that folder could stand in for

if __name__ == "__main__":  # a worker process that multiprocessing spawns imports this file too
    from harness.cli.commands import single

    single("report")
