"""benchmarks/licences.py: what packages say of their licence, in the forms in which they say it."""

from importlib.metadata import Distribution

import pytest

from benchmarks import licences


@pytest.mark.parametrize(
    "about, says",
    [
        ("License-Expression: MIT\nLicense: another", "MIT"),
        ("License: BSD\nClassifier: License :: OSI Approved :: MIT License", "BSD"),
        ("License: Copyright me\n        All rights\nClassifier: License :: OSI Approved :: ISC", "ISC"),
        ("License: Copyright me\n        All rights", "Copyright me"),
        ("Classifier: Topic :: Text", "not named; no licence file"),
    ],
)
def test_a_licence_is_shown_as_it_is_stated(tmp_path, about, says):
    (tmp_path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy\nVersion: 1\n{about}\n")
    assert licences.stated(Distribution.at(tmp_path)) == says


def test_every_installed_package_is_listed(capsys):
    licences.main([])
    assert ", pytest " in capsys.readouterr().out


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["pytest"], 2)])
def test_it_takes_no_arguments(arguments, code, capsys):
    with pytest.raises(SystemExit) as ended:
        licences.main(arguments)
    assert ended.value.code == code and "MIT" not in capsys.readouterr().out
