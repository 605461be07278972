"""The report: tables -> text, figures and report.html."""
