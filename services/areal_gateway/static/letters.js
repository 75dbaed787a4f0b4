// What was given up, and why: a dialog over the page, filled when it is opened.

const LIMIT = 50;

function line(tag, name, content) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = content;
  return element;
}

function entry({ task_id: id, cause, reason, traceback, attempts, infrastructure_attempts: broken }) {
  const item = document.createElement("li");
  const head = line("div", "head", "");
  const count = attempts + broken;
  head.append(line("b", "", id), line("span", "", `${cause.replace("_", " ")}, ${count} attempt${count === 1 ? "" : "s"}`));
  item.append(head, line("p", "", reason));
  if (traceback) {
    const more = document.createElement("details");
    more.append(line("summary", "", "Traceback"), line("pre", "", traceback.trimEnd()));
    item.append(more);
  }
  return item;
}

export async function openLetters() {
  const dialog = document.getElementById("letters");
  const list = document.getElementById("letters-list");
  list.replaceChildren(line("li", "", "Asking the ledger"));
  dialog.showModal();
  try {
    const reply = await fetch(`v1/dead-letters?limit=${LIMIT}`);
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error);
    list.replaceChildren(...body.dead_letters.map(entry));
    if (body.dead_letters.length === LIMIT) list.append(line("li", "", `The ${LIMIT} newest; areal dead-letters list --limit 1000 shows more.`));
  } catch (error) {
    list.replaceChildren(line("li", "", `The ledger did not answer: ${error.message}`));
  }
}
