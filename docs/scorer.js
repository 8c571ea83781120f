// How the site's search ranks: as Sphinx does, but a heading that has the words in their
// order before pages that have them anywhere. Errors have a heading each.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) =>
    kind === "title" ? score + 20 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
