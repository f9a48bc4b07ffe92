"""Every planted defect is noticed by a case of `make test`, and what is planted is still there to be replaced."""

import ast
import re

import pytest

from .defects import DEFECTS
from .fast_part import IGNORED
from .planting import ROOT
from .running import control, noticed_by, project
from .table import PAGE, read, written

each = pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])


def test_defects_have_names_of_their_own_and_are_many():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 40


@each
def test_a_defect_can_be_planted(defect):
    source = (ROOT / "shardlib" / defect.file).read_text()
    planted = defect.planted(source)
    assert planted != source
    if defect.module:
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
    for test in defect.tests:
        path, _, function = test.partition("[")[0].partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M), test


def test_what_the_fast_part_leaves_out_is_there():
    assert [path for path in IGNORED if not (ROOT / path).exists()] == []


def test_the_page_tells_of_all_of_them():
    assert PAGE.read_text() == written(read())
    noticed = read()
    assert set(noticed) == {defect.name for defect in DEFECTS}
    likely = {defect.name: [test.partition("[")[0] for test in defect.tests] for defect in DEFECTS}
    assert [name for name, test in noticed.items() if test.partition("[")[0] not in likely[name]] == []


@pytest.fixture(scope="module")
def copy():
    with project() as made:
        yield made


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_without_a_defect_the_same_tests_pass(copy):
    found = control(copy, read().values())
    assert not found.test, found.output


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@each
def test_a_defect_is_noticed(copy, defect):
    found = noticed_by(copy, defect, read()[defect.name])
    if found.skipped:
        pytest.skip("the case that notices it is skipped on this machine")
    assert found.noticed, found.output
