"""``python -m harness.doctor FILE``."""

if __name__ == "__main__":
    from harness.cli import doctor_main

    doctor_main()
