// Each part is built by itself: what one run's data break leaves the others readable.
for (const [id, build] of [["overview", buildOverview], ["evaluation", buildEvaluation], ["curves", buildCurves],
  ["samples", buildSamples], ["config", buildConfig], ["environment", buildEnvironment]]) {
  const section = document.getElementById(id);
  try {
    build(section);
  } catch (error) {
    console.error(error);
    section.append(el("p", { class: "note" }, "This part could not be shown: " + error.message));
  }
}
