"""The text table and the figure of predicted steps, of a family whose parts are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from harness.analysis.prediction.collective_times import Links
from harness.analysis.prediction.observed import Exchange, Size
from harness.analysis.prediction.predictions import Asked, predictions
from harness.analysis.results import Results
from harness.report.figures.drawing import style
from harness.report.figures.prediction import predicted_steps, write_prediction
from harness.report.tables.prediction import disagreements, measured_alone, prediction_table, prediction_words, refusals
from tests.analysis.prediction.world import EXCHANGES, LINKS, collectives, family, observed, step_s

BASE_PER_S = 30.0


def table(asked: Asked | None = None, **changed: Any) -> pd.DataFrame:
    of = family({size: observed(size, **changed) for size in family().sizes})
    bases = {"cell4": BASE_PER_S}
    return predictions([of], LINKS, {}, asked or Asked(devices=(8, 64), nodes=(8, 64)), bases)


def drawn(prediction: pd.DataFrame) -> Any:
    with style():
        return predicted_steps(cast(Results, SimpleNamespace(prediction=prediction)))


def test_a_row_has_the_measured_and_the_predicted_step_and_a_narrow_table_neither_label_nor_parts() -> None:
    content = prediction_table(table())
    titles = [heading.title for heading in content.columns]
    held_out, asked = (dict(zip(titles, line.cells, strict=True)) for line in content.rows)
    assert held_out["cells"] == "ddp · resnet8" and held_out["devices"] == "4 on 4 nodes" and held_out["from"] == "1, 2"
    assert held_out["measured, ms"].startswith(f"{1e3 * step_s(4):.4g}") and " to " in held_out["predicted, ms"]
    assert held_out["error"].endswith("%") and held_out["error"][0] in "+-"
    assert asked["devices"] == "8 on 8 nodes" and asked["from"] == "1, 2, 4"
    assert asked["measured, ms"] == "" and asked["error"] == ""
    assert asked["ring line"]
    titles = [heading.title for heading in prediction_table(table(), narrow=True).columns]
    assert titles == ["devices", "measured, ms", "predicted, ms", "error", "per s", "efficiency"]


def _last(prediction: pd.DataFrame, **asked: Any) -> tuple[str, ...]:
    return prediction_table(prediction, narrow=True, **asked).rows[-1].cells


def test_a_prediction_is_samples_a_second_an_efficiency_and_a_price_of_a_million() -> None:
    prediction = table()
    row = prediction[prediction["devices"] == 8].iloc[0]
    content = prediction_table(prediction, narrow=True, price=3.6, currency="USD")
    asked = dict(zip([heading.title for heading in content.columns], content.rows[-1].cells, strict=True))
    assert asked["per s"] == f"{row['throughput_per_s']:,.0f}"
    assert asked["efficiency"] == f"{100 * row['throughput_per_s'] / 8 / BASE_PER_S:.0f} %"
    assert asked["price of a million"] == f"{3.6 * 8 * 1e6 / row['throughput_per_s'] / 3600:.3g} USD"
    dear = dict(zip([heading.title for heading in content.columns], _last(prediction, price=36_000), strict=True))
    assert dear["price of a million"] == f"{36_000 * 8 * 1e6 / row['throughput_per_s'] / 3600:,.0f}"


def test_sizes_from_two_on_and_few_blocks_leave_efficiency_and_interval_out(tmp_path: Path) -> None:
    known = {size: replace(observed(size), step_s=(0.1, 0.11)) for size in (Size(2, 2), Size(4, 4))}
    found = predictions([family(known)], LINKS, {}, Asked(devices=(8,), nodes=(8,)))
    shown = prediction_table(found)
    row = dict(zip([heading.title for heading in shown.columns], shown.rows[-1].cells, strict=True))
    assert "efficiency" not in row and row["predicted, ms"].replace(".", "").isdigit()
    assert write_prediction(tmp_path, found)


def test_a_figure_is_written_into_a_new_folder_of_a_new_folder(tmp_path: Path) -> None:
    assert write_prediction(tmp_path / "new" / "deep", table())


def test_models_that_are_far_apart_at_the_largest_size_are_a_sentence() -> None:
    prediction = table()
    known = prediction["devices"] == 8
    prediction.loc[known, ["step_s", "amdahl_s", "ring_line_s"]] = [0.01, 0.026, float("nan")]
    (said,) = disagreements(prediction)
    assert said.endswith("8 devices on 8 nodes: the models disagree 2.6-fold: 10 ms predicted, 26 ms by Amdahl's law.")
    prediction.loc[known, "amdahl_s"] = 0.0149
    assert disagreements(prediction) == []


def test_what_is_refused_is_a_sentence_with_the_sizes_and_the_cells_that_share_a_reason() -> None:
    (sentence,) = refusals(table())
    assert sentence.startswith("Not predicted: ddp · resnet8 on 64 devices on 64 nodes: more than 8 times the largest")
    (sentence,) = refusals(table(strategy="dp"))
    assert "8 devices on 8 nodes, 64 devices on 64 nodes: dp is not predicted" in sentence
    assert measured_alone(table(), [4, 8]) == []
    (sentence,) = measured_alone(table(), [2, 8])
    assert "on 2 devices on 2 nodes: it was measured, " in sentence and "needs two smaller measured sizes" in sentence
    one_node = {size: observed(size) for size in (Size(1, 1), Size(2, 1))}
    gathered = tuple(Exchange("all_gather", each.size_bytes, 0.0, 0.0) for each in EXCHANGES)
    of = [
        family({size: replace(seen, row={**seen.row, "family_id": label, "setting": label}) for size, seen in cells})
        for label, cells in (("resnet8", one_node.items()), ("resnet14", one_node.items()))
    ] + [family({size: observed(size, strategy="fsdp", family_id="c") for size in one_node}, exchanges=gathered)]
    inside = collectives(ranks=(2,), tier="inside a node", nodes=1)
    (sentence,) = refusals(predictions(of, Links(inside), {}, Asked(devices=(8, 16), nodes=(4, 8))))
    named = "ddp · resnet8; ddp · resnet14; fsdp · resnet8 on 8 devices on 4 nodes, 16 devices on 8 nodes"
    why = "not every collective of its step was measured between nodes (gloo)"
    assert sentence.startswith(f"Not predicted: {named}: {why}")


def test_the_words_say_how_good_held_out_sizes_were() -> None:
    words = prediction_words(table())
    assert words.startswith("Predictions of 1 measured sizes from smaller ones were ")
    assert "a slower machine is not predicted" in words and "An assumed link" not in words
    assumed = table().assign(marks=[("assumed link: ethernet-10g",)] * len(table()))
    assert "An assumed link is taken to reach 80 % (50 % to 95 %) of its stated bandwidth" in " ".join(
        prediction_words(assumed).replace("\N{NO-BREAK SPACE}", " ").split()
    )


def test_the_figure_has_measured_predicted_and_laws_and_a_bar_for_a_single_prediction() -> None:
    drawing = drawn(table())
    (axes,) = drawing.figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "64"]
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend == ["ddp, predicted", "95 % interval", "measured", "ideal", "Amdahl", "ring line"]
    marks = [mark.text for mark in drawing.figure.marks]
    assert sum("measured" in text for text in marks) == 3 and sum("predicted" in text for text in marks) == 2
    two = family({size: seen for size, seen in family().sizes.items() if size != Size(4, 4)})
    prediction = predictions([two], LINKS, {}, Asked(devices=(8,), nodes=(8,)))
    assert drawn(prediction).figure is not None


@pytest.mark.parametrize("strategy", ["dp", "mine"])
def test_without_predictions_there_is_a_reason_and_no_file(strategy: str, tmp_path: Path) -> None:
    assert drawn(table(strategy=strategy)).caption == "Left out: no size is predicted."
    assert write_prediction(tmp_path / "figures", table(strategy=strategy)) == []
    assert not (tmp_path / "figures").exists()


def test_the_figure_is_written_in_both_formats(tmp_path: Path) -> None:
    files = write_prediction(tmp_path / "figures", table())
    assert sorted(path.name for path in files) == ["prediction_asked.png", "prediction_asked.svg"]
    assert all(path.stat().st_size > 1000 for path in files)
