"""Takes docs/page.png: the page of a running server while the model writes.

.venv/bin/outrider serve --port 8000 &
.venv/bin/python scripts/screenshot_page.py http://127.0.0.1:8000/ docs/page.png
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

NUM_PASSES = 34


def take(url: str) -> bytes:
    """A picture of the page after a run without guesses, in the midst of one with them."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1180, "height": 1740})
        page.goto(url)
        guesses = page.get_by_label("Guesses (K)")
        guesses.press("Home")
        page.get_by_role("button", name="Write").click()
        page.get_by_text("Done.").wait_for(timeout=120_000)
        guesses.press("End")
        page.get_by_role("button", name="Write").click()
        page.locator(".pass").nth(NUM_PASSES).wait_for(timeout=120_000)
        picture = page.screenshot()
        browser.close()
    return picture


def main(url: str, path: Path) -> None:
    """Writes the picture with few colours, which the page does not exceed by much."""
    picture = Image.open(io.BytesIO(take(url))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
