"""Checks that pyright finds the mistakes planted in tests/typing/mistakes.py, each on its line, and nothing else."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PLANTED = ROOT / "tests" / "typing" / "mistakes.py"


def main() -> int:
    """The exit status: 0 if the lines with errors are those that say so."""
    pyright = str(pathlib.Path(sys.executable).with_name("pyright"))
    command = [pyright, "--pythonpath", sys.executable, "--outputjson", str(PLANTED)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)["generalDiagnostics"]
    found = {error["range"]["start"]["line"] + 1 for error in told if error["severity"] == "error"}
    lines = PLANTED.read_text().splitlines()
    planted = {i for i, line in enumerate(lines, 1) if "# wrong: " in line}
    for i in sorted(planted - found):
        print(f"{PLANTED.name}:{i}: pyright does not find this: {lines[i - 1]}")
    for i in sorted(found - planted):
        print(f"{PLANTED.name}:{i}: pyright finds an error where there is none: {lines[i - 1]}")
    if not planted:
        print(f"{PLANTED.name}: no mistakes are planted")
    return 1 if planted != found or not planted else 0


if __name__ == "__main__":
    sys.exit(main())
