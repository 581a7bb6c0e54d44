"""bash completes jaxshard's commands, options, values and presets by the script that `jaxshard completion` prints."""

import subprocess

import pytest

from jaxshard.cli import COMMANDS, main
from jaxshard.cli.completion.command import script

CASES = {
    ("pl",): ["plan"],
    ("train", "ze"): ["zero1", "zero2", "zero3"],
    ("train", "my_"): ["my_config.toml"],
    ("train", "--sharding.stra"): ["--sharding.strategy"],
    ("train", "zero3", "--sharding.strategy", "z"): ["zero1", "zero2", "zero3"],
    ("train", "--precision.moments", ""): ["float32", "bfloat16", "int8"],
    ("train", "--data", "my_"): ["my_config.toml"],
    ("train", "--train.steps", ""): [],
    ("plan", "--mach"): ["--machine"],
    ("plan", "--strategies", "hf"): ["hfsdp"],
    ("explain", "--no-c"): ["--no-compile"],
    ("eval", "my_"): ["my_config.toml"],
    ("ckpt", "e"): ["export"],
    ("ckpt", "export", "--safe"): ["--safetensors"],
    ("ckpt", "export", "--dtype", "b"): ["bfloat16"],
    ("doctor", "--sec"): ["--seconds"],
    ("completion", "z"): ["zsh"],
}


def completed(where, *words):
    quoted = " ".join(f'"{word}"' for word in ("jaxshard", *words))
    program = f"{script('bash')}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words)}\n_jaxshard\n"
    program += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc", "-c", program], cwd=where, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [word for word in done.stdout.splitlines() if word]


def test_words_are_completed(tmp_path):
    (tmp_path / "my_config.toml").touch()
    assert {words: completed(tmp_path, *words) for words in CASES} == CASES


def test_every_command_and_its_help_are_completed(tmp_path):
    assert completed(tmp_path, "") == [*COMMANDS, "--help", "--version"]
    for name in COMMANDS:
        assert "--help" in completed(tmp_path, name, "--"), name


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_command_prints_the_script(capsys, shell):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell)
    assert ("bashcompinit" in printed) == (shell == "zsh")


@pytest.mark.parametrize("words", [[], ["bsh"], ["tcl"]])
def test_an_unknown_shell_is_an_error(capsys, words):
    assert main(["completion", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard completion: ")
    assert ("did you mean 'bash'?" if words == ["bsh"] else "bash, zsh") in line
