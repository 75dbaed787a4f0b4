// Axis numbers. No DOM here, so that unit tests can call these functions.

// About `count` round numbers that span [low, high]; whole ones if `whole` (steps, counts).
export function ticks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / Math.max(1, count), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw - 1e-12 && (!whole || Number.isInteger(s)));
  const result = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    result.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return result;
}

// [low, high] around the values with a margin, which crosses 0 or 1 only if some value does.
export function fit(values) {
  if (!values.length) return [0, 1];
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const margin = most > least ? (most - least) * 0.08 : Math.abs(most) * 0.1 || 1;
  const low = least >= 0 ? Math.max(0, least - margin) : least - margin;
  return [low, most <= 1 ? Math.min(1, most + margin) : most + margin];
}

// Digits after the decimal point that distinguish numbers `step` apart.
export function decimals(step) {
  for (let digits = 0; digits < 8; digits += 1) {
    if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) < 1e-6 * 10 ** digits * step) return digits;
  }
  return 8;
}

// {name: [[step, mean]]} from the trainer's evaluations; NAME_before and NAME_after form one line.
export function heldOut(evaluations) {
  const lines = {};
  for (const { name, step, mean_reward: mean } of evaluations) {
    const line = (lines[name.replace(/_(before|after)$/, "")] ??= new Map());
    line.set(step, mean);
  }
  return Object.fromEntries(Object.entries(lines).map(([name, line]) => [name, [...line].sort((a, b) => a[0] - b[0])]));
}

// The rows that the last evaluation of a line is over, " (9 of 12 rows)"; "" if they are unknown.
export function overRows(evaluations, line) {
  const last = evaluations.filter(({ name }) => name.replace(/_(before|after)$/, "") === line).pop();
  if (!last?.rows) return "";
  return last.failed ? ` (${last.rows} of ${last.rows + last.failed} rows)` : ` (${last.rows} rows)`;
}

// At most `limit` points, the mean (or the largest) of each bucket: a screen has no more columns.
export function thin(points, limit, largest = false) {
  if (points.length <= limit) return points;
  const size = points.length / limit;
  const result = [];
  for (let i = 0; i < limit; i += 1) {
    const part = points.slice(Math.floor(i * size), Math.floor((i + 1) * size));
    const values = part.map((p) => p[1]);
    const value = largest ? Math.max(...values) : values.reduce((a, b) => a + b, 0) / part.length;
    result.push([part[part.length - 1][0], value]);
  }
  return result;
}
