// Variables that Gradio passes to `js_on_load`, and the properties that scripts add to `window`.

interface Component {
  element: any; // root of the component; its descendants have many types
  props: { max_trace: number; recordings: string[]; lessons?: any };
  trigger: (event: string, data?: unknown) => void;
}

interface NavigateEvent extends Event {
  navigationType: string;
  userInitiated: boolean;
}

interface Window {
  navigation?: { addEventListener(type: "navigate", listener: (event: NavigateEvent) => void, options?: AddEventListenerOptions): void };
  specdemo?: Record<string, Function>;
  specdemoRestored?: { settings: Record<string, unknown>; lanes: { lanes: unknown[]; text: string } };
  specdemoRun?: string;
  gradio_config?: { root?: string };
  __gradio_session_hash__?: string;
}
