// The two charts, drawn anew with each frame: a few dozen rectangles.

import { classOf } from "/page/text.js";

const LEFT = 36;
const RIGHT = 316;
const TOP = 14;
const BOTTOM = 140;
const NUM_PASSES_SHOWN = 40;

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

/** How often the guess at each position was kept, of the passes that had one there. */
export function drawPositions(svg, tally) {
  const numPositions = tally.draftedAt.length;
  const shapes = axis(svg, [0, 0.5, 1], 1, percent);
  const width = (RIGHT - LEFT) / Math.max(numPositions, 1);
  const told = [];
  tally.draftedAt.forEach((drafted, i) => {
    const share = tally.acceptedAt[i] / drafted;
    const x = LEFT + width * (i + 0.5);
    const barWidth = Math.min(width * 0.6, 56);
    const y = heightOf(share, 1);
    shapes.push(
      shape(svg, "rect", `bar ${classOf(`accepted_${i + 1}`)}`, {
        x: x - barWidth / 2, y, width: barWidth, height: BOTTOM - y,
      }),
      text(svg, x, y - 3, percent(share), "value"),
      text(svg, x, BOTTOM + 13, `guess ${i + 1}`, "tick"),
      text(svg, x, BOTTOM + 25, `${tally.acceptedAt[i]} of ${drafted}`, "tick"),
    );
    told.push(`guess ${i + 1}: ${percent(share)}, ${tally.acceptedAt[i]} of ${drafted}`);
  });
  svg.setAttribute("aria-label", told.join("; ") || "No guesses");
  svg.replaceChildren(...shapes);
}

/** The tokens of the last passes, in the colours of their sources, and the mean of all. */
export function drawTimeline(svg, tally, maxDrafts) {
  const most = maxDrafts + 1;
  const ticks = [...new Set([0, 1, Math.ceil(most / 2), most])];
  const shapes = axis(svg, ticks, most, String);
  const shown = tally.history.slice(-NUM_PASSES_SHOWN);
  const width = (RIGHT - LEFT) / NUM_PASSES_SHOWN;
  shown.forEach((sources, i) => {
    sources.forEach((source, j) => {
      const y = heightOf(j + 1, most);
      shapes.push(
        shape(svg, "rect", `bar ${classOf(source)}`, {
          x: LEFT + width * i + 0.5, y: y + 0.5, width: width - 1,
          height: heightOf(j, most) - y - 1,
        }),
      );
    });
  });
  const mean = tally.tokensPerPass;
  if (mean !== null) {
    const y = heightOf(mean, most);
    shapes.push(
      shape(svg, "line", "mean", { x1: LEFT, x2: RIGHT, y1: y, y2: y }),
      text(svg, RIGHT, BOTTOM + 13, `mean ${mean.toFixed(2)} a pass`, "tick end"),
      text(svg, LEFT, BOTTOM + 13, `last ${shown.length} of ${tally.passes} passes`, "tick start"),
    );
    const told = `${tally.passes} passes, ${mean.toFixed(2)} tokens a pass`;
    svg.setAttribute("aria-label", `${told}; without guesses it is 1`);
  } else {
    svg.setAttribute("aria-label", "No passes yet");
  }
  svg.replaceChildren(...shapes);
}

function heightOf(value, most) {
  return BOTTOM - ((BOTTOM - TOP) * value) / most;
}

function axis(svg, ticks, most, write) {
  return ticks.flatMap((tick) => {
    const y = heightOf(tick, most);
    return [
      shape(svg, "line", "grid", { x1: LEFT, x2: RIGHT, y1: y, y2: y }),
      text(svg, LEFT - 4, y + 3, write(tick), "tick end"),
    ];
  });
}

function shape(svg, name, className, attributes) {
  const made = document.createElementNS(svg.namespaceURI, name);
  made.setAttribute("class", className);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(svg, x, y, content, className) {
  const made = shape(svg, "text", className, { x, y });
  made.textContent = content;
  return made;
}
