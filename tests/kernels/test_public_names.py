"""The package's public names: cheap to import, callable, and no module in their place."""

from __future__ import annotations

import subprocess
import sys

import pytest

import halftune_kernels


@pytest.mark.parametrize("name", halftune_kernels.__all__)
def test_each_is_the_operator(name: str) -> None:
    operator = getattr(halftune_kernels, name)
    assert callable(operator)
    assert operator.__name__ == name


def test_a_name_stays_the_operator_after_its_files_are_imported() -> None:
    import halftune_kernels.ops.gated_delta_rule.cpu
    from halftune_kernels import gated_delta_rule

    assert gated_delta_rule is halftune_kernels.ops.gated_delta_rule.gated_delta_rule


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, halftune_kernels; assert 'torch' not in sys.modules; assert 'kda' in dir(halftune_kernels)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_none_of_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gated_delta'"):
        _ = halftune_kernels.gated_delta  # pyright: ignore[reportAttributeAccessIssue]
