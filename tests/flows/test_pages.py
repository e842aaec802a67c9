"""Pages in the browser: a run's report in Prefect, a deployment's form, and trainings' losses in MLflow."""

import shutil

import httpx
import pytest
from prefect.utilities.callables import parameter_schema

from conf.load import load
from flows.finetune import finetune
from tasks.pages import deployment_form
from tests.support.flow_world import World

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
LONG = 60_000  # milliseconds that a page may take on a busy machine


@pytest.fixture(scope="module")
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 1900})
        browser.close()


def report_of(place: World, output: str) -> str:
    """Address of the report of the run that printed this."""
    (run,) = place.ask_prefect("flow_runs/filter", flow_runs={"name": {"any_": [place.name_of(output)]}})
    made = place.ask_prefect("artifacts/filter", flow_runs={"id": {"any_": [run["id"]]}})
    (id,) = [one["id"] for one in made if one["key"] == "report-quick"]
    return f"{place.prefect.removesuffix('/api')}/artifacts/artifact/{id}"


def test_prefect_s_page_of_a_run_leads_to_its_report(place: World, first, page):
    (run,) = place.ask_prefect("flow_runs/filter", flow_runs={"name": {"any_": [place.name_of(first)]}})
    root = place.prefect.removesuffix("/api")
    page.goto(f"{root}/runs/flow-run/{run['id']}")
    page.get_by_text("Artifacts", exact=True).last.click(timeout=LONG)
    page.get_by_text("report-quick").first.click(timeout=LONG)
    page.get_by_text("held_out/exact_match").first.wait_for(timeout=LONG)
    assert page.get_by_role("cell", name="evaluate-tuned").count()
    curves = page.locator("img[alt=training]")
    curves.wait_for(timeout=LONG)
    assert curves.evaluate("image => image.naturalWidth") > 300


def test_the_report_shows_every_answer_at_1280_pixels(place: World, first, page):
    page.goto(report_of(place, first))
    answers = page.locator("table", has=page.get_by_text("reference", exact=True)).first
    answers.wait_for(timeout=LONG)
    assert answers.locator("th").all_inner_texts() == ["prompt", "tuned", "reference", "base"]
    assert answers.locator("tbody tr").count() == 8
    # Prefect hides what is wider than its table's frame.
    seen = """cell => {
        const right = cell.getBoundingClientRect().right;
        for (let frame = cell.parentElement; frame; frame = frame.parentElement) {
            const hides = getComputedStyle(frame).overflowX !== "visible";
            if (hides && right > frame.getBoundingClientRect().right + 1) return false;
        }
        return right <= window.innerWidth;
    }"""
    cells = answers.locator("td")
    assert all(cells.nth(number).evaluate(seen) for number in range(cells.count()))
    assert page.get_by_text("python -m flows.serve quick@1").count()


def test_the_form_shows_the_preset_s_values_and_refuses_a_wrong_one_in_words(place: World, first, page):
    (flow,) = place.ask_prefect("flows/filter", flows={"name": {"any_": ["finetune"]}})
    schema = deployment_form.with_values(parameter_schema(finetune).model_dump(), load("tiny"))
    asked = {"name": "seen", "flow_id": flow["id"], "parameters": {"conf": "tiny"}, "parameter_openapi_schema": schema}
    made = httpx.post(f"{place.prefect}/deployments/", json=asked | {"enforce_parameter_schema": True})
    root = place.prefect.removesuffix("/api")
    page.goto(f"{root}/deployments/deployment/{made.raise_for_status().json()['id']}/run")
    rate = page.get_by_text(f"in tiny: {load('tiny').optimizer.lr}").first
    rate.wait_for(timeout=LONG)
    assert page.locator("input, textarea, select").count() < 20
    assert page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(e => e.scrollHeight))") < 2000
    rate.locator("xpath=following::input[1]").fill("5")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("5 is greater than the maximum of 1").first.wait_for(timeout=LONG)
    page.get_by_text("every key", exact=True).click()
    page.get_by_text("tp * cp * pp * dp").first.wait_for(timeout=LONG)


@pytest.mark.timeout(400)
def test_the_report_leads_to_mlflow_s_losses_of_several_trainings(place: World, first, page):
    """One click from the report; the loss is what MLflow shows first."""
    output = place.run("optimizer.lr=2e-3", "--until", "train")
    page.goto(report_of(place, output))
    page.get_by_text("MLflow, this training compared with earlier ones").wait_for(timeout=LONG)
    charts = page.get_by_text("MLflow, all trainings' losses").get_attribute("href")
    page.goto(charts)
    page.get_by_text("loss/training", exact=True).first.wait_for(timeout=LONG)
    sections = page.inner_text("body").split("\n")
    assert sections.index("loss") < sections.index("optimizer")
    page.locator(".js-plotly-plot").first.locator(".scatterlayer .trace").nth(1).wait_for(timeout=LONG)
