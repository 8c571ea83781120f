// How the site's search ranks: as Sphinx does, but a heading that has the words in their
// order before pages that have them anywhere, and a class of errors where it is explained.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) =>
    kind === "title" ? score + (docname === "errors/index" ? 60 : 20) : score,
  objNameMatch: 30,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
