// A page that is opened from the disk has no search: browsers load the index from a server only.
if (location.protocol === "file:") {
  const note = document.createElement("span");
  note.className = "search-note";
  note.textContent = "search: mkdocs serve";
  note.title = "Search needs a server: mkdocs serve, in the folder of the repository";
  document.querySelector(".md-header__title").after(note);
}
