// Variables that Gradio passes to `js_on_load`, and the properties that scripts add to `window`.

declare const element: any; // root of the component; its descendants have many types
declare const props: { value: string | null; max_trace: number };
declare function watch(property: string, callback: () => void): void;

// Unknown runs result in null, failed requests in undefined.
type Query = (argument: unknown) => Promise<string | null | undefined>;
declare const server: Record<
  "trace" | "csv" | "svg" | "round" | "figures" | "web_page" | "trace_since" | "import_trace" | "recorded" | "stop_run",
  Query
>;

interface NavigateEvent extends Event {
  navigationType: string;
  userInitiated: boolean;
}

interface Window {
  navigation?: { addEventListener(type: "navigate", listener: (event: NavigateEvent) => void, options?: AddEventListenerOptions): void };
  specdemoListeners?: AbortController;
  specdemoTabs?: BroadcastChannel;
  specdemoLanes?: unknown[];
  specdemoRun?: string;
  specdemoRecorded?: Record<string, unknown>;
  gradio_config?: { root?: string };
}
