"""The pipeline of the command: validate, plan, execute, retry, resume, report."""
