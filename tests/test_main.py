import epp.__main__
from epp.__main__ import SUBCOMMANDS, USAGE, main


def test_without_a_command_the_usage_is_an_error(capsys):
    """On standard error, so that a script's output stays empty."""
    assert main([]) == 2
    assert capsys.readouterr() == ("", USAGE)


def test_an_unknown_command_is_named(capsys):
    """In one line, without all of those that there are in front or behind."""
    assert main(["nonsense"]) == 2
    assert capsys.readouterr() == ("", "epp: unknown command 'nonsense', `epp --help` lists them\n")


def test_a_misspelt_command_is_told_with_the_nearest(capsys):
    """In one line too."""
    assert main(["chek-config"]) == 2
    told = "epp: unknown command 'chek-config', did you mean `check-config`?\n"
    assert capsys.readouterr() == ("", told)


def test_the_version_is_one_line(capsys):
    """That of the package."""
    for flag in ("--version", "-version"):
        assert main([flag]) == 0
        assert capsys.readouterr() == (f"epp {epp.__version__}\n", "")


def test_help_is_no_error(capsys):
    """Of the command and of each of its commands, on standard output."""
    for arguments in (["--help"], ["-h"], ["-help"]):
        assert main(arguments) == 0
        assert capsys.readouterr() == (USAGE, "")
    for command in SUBCOMMANDS:
        assert main([command, "--help"]) == 0
        shown, errors = capsys.readouterr()
        assert shown.startswith(f"usage: epp {command} ")
        assert errors == ""


def test_a_wrong_flag_is_told_with_its_command(capsys):
    """One line, exit code 2."""
    assert main(["serve", "--grpc-prot=1"]) == 2
    shown, errors = capsys.readouterr()
    assert (shown, errors.count("\n")) == ("", 1)
    assert errors.startswith("epp serve: unknown flag '--grpc-prot', did you mean --grpc-port?")


def test_flags_alone_are_those_of_serve(monkeypatch):
    """As the field's manifests start a picker."""
    given = ["--pool-name", "models", "--pool-namespace", "llm", "--zap-encoder", "json"]
    served = []
    monkeypatch.setattr(epp.__main__, "run", lambda name, _, told: served.append((name, told)) or 0)
    for arguments in (given, ["serve", *given]):
        assert main(arguments) == 0
    assert served == [("serve", given)] * 2


def test_a_wrong_flag_alone_is_told_with_serve(capsys):
    """One line, exit code 2; and help behind another flag is that of `serve`."""
    assert main(["--grpc-prot=1"]) == 2
    shown, errors = capsys.readouterr()
    assert (shown, errors.count("\n")) == ("", 1)
    assert errors.startswith("epp serve: unknown flag '--grpc-prot', did you mean --grpc-port?")
    assert main(["--v=2", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: epp serve ")


def test_an_interrupt_is_no_traceback(monkeypatch):
    """Ctrl-C before the server waits for it ends as shells expect."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(epp.__main__, "run", interrupted)
    assert main(["serve"]) == 130
