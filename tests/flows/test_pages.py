"""What a person sees in the browser: the report of a run in Prefect, two runs' losses side by side in MLflow."""

import shutil

import pytest

from tests.support.flow_world import World

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")


@pytest.fixture(scope="module")
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1400, "height": 1900})
        browser.close()


def test_prefect_s_page_of_a_run_leads_to_its_report(place: World, first, page):
    (run,) = place.ask_prefect("flow_runs/filter", flow_runs={"name": {"any_": [place.name_of(first)]}})
    root = place.prefect.removesuffix("/api")
    page.goto(f"{root}/runs/flow-run/{run['id']}")
    page.get_by_text("Artifacts", exact=True).last.click(timeout=30_000)
    page.get_by_text("report-quick").first.click(timeout=30_000)
    page.get_by_text("held_out/exact_match").first.wait_for(timeout=30_000)
    assert page.get_by_role("cell", name="evaluate-tuned").count()
    loss = page.locator("img[alt=loss]")
    loss.wait_for(timeout=10_000)
    assert loss.evaluate("image => image.naturalWidth") > 300


@pytest.mark.timeout(300)
def test_mlflow_compares_the_losses_of_two_runs(place: World, first, page):
    from mlflow import MlflowClient

    place.run("optimizer.lr=2e-3", "--until", "train")
    client = MlflowClient(place.mlflow)
    wanted = "tags.finetune.stage = 'train' and metrics.lm_loss > 0"
    runs = [run.info.run_id for run in client.search_runs(["1"], wanted) if "tokens_per_second" in run.data.metrics]
    assert len(runs) >= 2
    chosen = "%22,%22".join(runs[:2])
    page.goto(f"{place.mlflow}/#/compare-runs?runs=[%22{chosen}%22]&experiments=[%221%22]")
    page.get_by_text("lm_loss").first.wait_for(timeout=30_000)
    page.goto(
        f"{place.mlflow}/#/metric?runs=[%22{chosen}%22]&metric=%22lm_loss%22&experiments=[%221%22]&plot_metric_keys=[%22lm_loss%22]"
    )
    page.locator(".js-plotly-plot .scatterlayer .trace").nth(1).wait_for(timeout=30_000)
