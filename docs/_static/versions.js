// Offers the other versions of the documentation, which docs/publish.py lists beside them.
// A site that was only built has no list, so that none is asked for: publish.py says otherwise.
const PUBLISHED = false;
(async () => {
  if (!PUBLISHED) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const here = location.href.slice(root.href.length);
  const list = new URL("../versions.json", root);

  let versions;
  try {
    const answer = await fetch(list);
    if (!answer.ok) return;
    versions = await answer.json();
  } catch {
    return;
  }

  const select = document.getElementById("versions");
  for (const { folder, name } of versions) {
    const own = new URL(`${folder}/`, list).href === root.href;
    select.add(new Option(name, folder, own, own));
  }
  select.closest(".versions").hidden = false;
  select.addEventListener("change", async () => {
    const start = new URL(`${select.value}/`, list);
    const page = new URL(here, start);
    const answer = await fetch(page, { method: "HEAD" }).catch(() => null);
    location.href = answer?.ok ? page : start;
  });
})();
