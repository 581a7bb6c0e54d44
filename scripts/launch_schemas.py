"""Writes tests/schemas/, by which tests/test_launch.py checks the recipes, from the programs themselves.

They pin what they depend on, so each wants an environment of its own:
  pip install skypilot; python scripts/launch_schemas.py skypilot
  pip install xpk; python scripts/launch_schemas.py xpk
  apt-get install slurm-client man-db; python3 scripts/launch_schemas.py slurm
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from importlib import metadata

SCHEMAS = pathlib.Path(__file__).parent.parent / "tests" / "schemas"


def skypilot():
    """The JSON schemas of a task and its parts, as strict as SkyPilot's server takes them."""
    from sky.utils import schemas

    schemas._allow_additional_properties = lambda: False
    parts = {name: getattr(schemas, f"get_{name}_schema")() for name in ("task", "resources", "storage")}
    return {"source": f"SkyPilot {metadata.version('skypilot')}, Apache-2.0, sky/utils/schemas.py", **parts}


def xpk():
    """The options of `xpk workload create`, as its argparse parser has them; TPUs by number of chips only."""
    from xpk.core.system_characteristics import AcceleratorType, get_system_characteristics_keys_by_accelerator_type
    from xpk.parser.workload import set_workload_parsers

    parser = argparse.ArgumentParser()
    set_workload_parsers(parser)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    create = commands.choices["create"]
    tpus = get_system_characteristics_keys_by_accelerator_type([AcceleratorType.TPU])
    tpus = sorted(name for name in tpus if name.split("-")[-1].isdecimal())
    options = [
        {
            "flags": action.option_strings,
            "takes_value": action.nargs != 0,
            "repeats": isinstance(action, argparse._AppendAction),
            "type": getattr(action.type, "__name__", "str"),
            "required": action.required,
            "choices": tpus if action.dest == "tpu_type" else action.choices,
        }
        for action in create._actions
        if not isinstance(action, argparse._HelpAction)
    ]
    exclusive = [
        {"flags": [action.option_strings[0] for action in group._group_actions], "required": group.required}
        for group in create._mutually_exclusive_groups
    ]
    source = f"xpk {metadata.version('xpk')}, Apache-2.0, xpk/parser/workload.py"
    return {"source": source, "options": options, "exclusive": exclusive}


def slurm():
    """Which options sbatch and srun have, and whether they take a value: the headings of their manuals."""
    version = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {"source": f"options in the manual pages of {version}", "sbatch": _manual("sbatch"), "srun": _manual("srun")}


def _manual(command):
    page = subprocess.run(["man", "--where", command], capture_output=True, text=True, check=True).stdout.strip()
    roff = subprocess.run(["zcat", "--force", page], capture_output=True, text=True, check=True).stdout
    options = {}
    for line in re.findall(r"^\.TP\n(.*)$", roff, re.M):
        heading = re.fullmatch(r"(?:-\w, )?--([\w-]+)(=\S.*|\[=.*)?", re.sub(r"\\f[BIR]|\\", "", line))
        if heading and heading[2] is None:
            options[heading[1]] = "none"
        elif heading:
            words = re.fullmatch(r"=\{([\w|]+)\}", heading[2])
            options[heading[1]] = words[1].split("|") if words else "optional" if heading[2][0] == "[" else "required"
    return options


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    written = json.dumps({"skypilot": skypilot, "xpk": xpk, "slurm": slurm}[name](), indent=1)
    (SCHEMAS / f"{name}.json").write_text(written + "\n")
