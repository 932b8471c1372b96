// Where the site is opened from a folder of files, a browser runs no worker: its search runs in a frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(source) {
      super();
      const base = new URL(source, location);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><body></body>";
      this.ready = new Promise((done) => this.frame.addEventListener("load", done)).then(() => {
        const inside = this.frame.contentWindow;
        const load = (url) =>
          new Promise((done, failed) => {
            const script = inside.document.createElement("script");
            script.src = new URL(url, base);
            script.onload = () => done();
            script.onerror = failed;
            inside.document.body.append(script);
          });
        inside.importScripts = (...urls) =>
          urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return load(base);
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
