"""Bars: one a stage, closed at its end, and none where nobody wants one."""

from jaxinfer.progress import progress_bars


def test_each_stage_has_a_bar_that_reaches_its_total(capsys):
    with progress_bars(True) as report:
        assert report is not None
        for stage, total in (("load", 3), ("compile", 2)):
            for done in range(total + 1):
                report(stage, done, total)
    err = capsys.readouterr().err
    assert err.index("load: 100%") < err.index("compile: 100%")
    assert "3/3" in err
    assert "2/2" in err
    assert err.endswith("\n")


def test_no_bar_is_drawn_where_none_is_wanted(capsys):
    with progress_bars(False) as report:
        assert report is None
    assert capsys.readouterr().err == ""
