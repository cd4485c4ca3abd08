"""Line charts as small SVG files, without a plotting library."""
import math
from html import escape
from pathlib import Path

COLORS = ["#3b6fb6", "#c8553d", "#4c956c", "#8e6bbf", "#b8860b", "#5f6b7a", "#d0679d", "#2a9d8f"]
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 300, 56, 34, 120, 40


def line_chart(series: dict[str, list[tuple[float, float]]], title: str, x_label: str, start: float = 0,
               top: float | None = None) -> str:
    """{name: [(x, y), ...]} -> an SVG with one line per name, named at its right end; y runs from `start` to `top`."""
    points = [point for line in series.values() for point in line]
    x_max, y_max = max(x for x, _ in points), max(y for _, y in points) if top is None else top
    x_min = min(x for x, _ in points)

    def place(x, y) -> str:
        across = (x - x_min) / (x_max - x_min or 1) * (WIDTH - LEFT - RIGHT)
        up = (y - start) / (y_max - start or 1) * (HEIGHT - TOP - BOTTOM)
        return f"{LEFT + across:.1f},{HEIGHT - BOTTOM - up:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12" fill="#667"><text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for tick in range(5):
        x, y = x_min + (x_max - x_min) * tick / 4, start + (y_max - start) * tick / 4
        height, across = float(place(x_min, y).split(",")[1]), place(x, start).split(",")[0]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}" stroke="#8884" />'
                     f'<text x="{LEFT - 6}" y="{height + 4}" text-anchor="end">{y:.3g}</text>'
                     f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:.4g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    ends = sorted((line[-1][1], name) for name, line in series.items())
    for number, (name, line) in enumerate(series.items()):
        color, path = COLORS[number % len(COLORS)], " ".join(place(x, y) for x, y in line)
        y = HEIGHT - BOTTOM - 14 * ends.index((line[-1][1], name)) - 4          # labels in the order of the lines' ends
        label = f"{escape(name)} {line[-1][1]:.3g}"
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" />'
                     f'<text x="{WIDTH - RIGHT + 8}" y="{y}" fill="{color}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def training_chart(rows: list[dict], path: Path, buckets: int = 200) -> None:
    """log.jsonl rows of train.py -> loss.svg, agreement.svg and, if it was measured, tau.svg in the folder `path`."""
    rows = [row for row in rows if math.isfinite(row["loss"])]
    size = -(-len(rows) // buckets)
    groups = [rows[i:i + size] for i in range(0, len(rows), size)]

    def mean(value):
        return [(group[-1]["step"], sum(map(value, group)) / len(group)) for group in groups]

    depth = len(rows[0]["agreement"])
    agreement = {f"step {k + 1}": mean(lambda row, k=k: row["agreement"][k]) for k in range(depth)}
    Path(path, "agreement.svg").write_text(line_chart(agreement, "top-1 agreement with the target", "optimiser steps"))
    loss = {"loss": mean(lambda row: row["loss"])}
    Path(path, "loss.svg").write_text(line_chart(loss, "training loss, summed over the steps", "optimiser steps"))
    tokens, curve = 0, []
    for row in rows:
        tokens += row["tokens"]
        curve += [(tokens / 1e3, row["held_out_tau"])] if "held_out_tau" in row else []
    if curve:
        tau = line_chart({"held out": curve}, "expected tau of a greedy chain", "thousand answer tokens seen", start=1)
        Path(path, "tau.svg").write_text(tau)
