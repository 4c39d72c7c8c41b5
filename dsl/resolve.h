#pragma once
// From layers of Nodes to one Recipe. Layers are applied in order, each field checked as it comes: a value that fails
// its own check leaves the one before it in place, so that later checks speak of real values. Then references and
// derived defaults are resolved, the struct is filled, and the checks across fields run. A cluster file is resolved in
// the same way, as one layer.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dsl/dsl.h"
#include "dsl/locate.h"
#include "dsl/node.h"
#include "dsl/schema.h"
#include "runtime/config/cluster.h"
#include "runtime/config/mistake.h"
#include "runtime/plan/batch_schedule.h"

namespace cairn::dsl {

class Resolver {
 public:
  /// `files`: name and text of everything read, to find lines in. `root`: what the layers are written in.
  explicit Resolver(const std::vector<std::pair<std::string, std::string>>& files, const Block& root = recipe_block())
      : files_(files), root_(root) {}

  void apply(const Layer& layer);
  /// `epoch_samples`: LoadOptions'.
  Recipe resolve(int64_t world, const std::function<Result<int64_t>(const Recipe&)>& epoch_samples);
  ClusterConfig resolve_cluster(Launcher launcher);  // `root` is one of cluster_blocks()

  std::vector<Diagnostic>& diagnostics() { return diagnostics_; }
  std::vector<Origin> origins();

 private:
  struct Setting {
    NodePtr value;
    Place place;
  };
  enum class Pass { kApply, kFinal };  // in kApply a T.ref has no value yet

  // stages.cc's side of Lua: resolve_stages.cc
  void resolve_stages(Recipe& recipe, int64_t world);
  Resolver layered(const Node& stage, bool* sets_schedule) const;

  // resolve.cc: layers, references, defaults
  void apply_entries(const Block& block, const std::string& path, const std::vector<Entry>& entries);
  NodePtr init_from_hf(const std::string& path, const Node& hf);
  void apply_field(const std::string& path, const Field& field, const NodePtr& value, const Place& place);
  void apply_block(const std::string& path, const Field& field, const NodePtr& value, const Place& place);
  void apply_data(const std::string& path, const Field& field, const NodePtr& value, const Place& place);
  void clear(const std::string& path);
  void unknown_field(const Block& block, const std::string& path, const Entry& entry);
  void complain(const std::string& path, const Place& place, const Complaint& complaint);
  void complain_type(const std::string& path, const Place& place, const Field& field, const Node& value);
  std::optional<Json> get(const std::string& path);
  std::optional<Json> fallback(const std::string& path, const Field& field);
  std::pair<std::string, int> locate(const Place& place);
  std::string source_line(const std::string& file, int line) const;
  Place place_of(const std::string& path) const;
  void check(const Recipe& recipe, int64_t world, const std::optional<RunPast>& past);
  FieldNotes notes();
  void report(std::vector<Mistake> mistakes);
  void fill(const Block& block, const std::string& path, void* object);

  // convert.cc: one value. nullopt: reported; null Json: fine, but its number is not known before the final pass
  std::optional<Json> convert(const std::string& path, const Field& field, const Node& value, const Place& place,
                              Pass pass);
  std::optional<Json> convert_plain(const std::string& path, const Field& field, const Node& value, const Place& place,
                                    Pass pass);
  std::optional<Json> convert_ref(const std::string& path, const Field& field, const Node& value, const Place& place,
                                  Pass pass);
  std::optional<Json> convert_span(const std::string& path, const Field& field, const Node& value, const Place& place,
                                   Pass pass);
  std::optional<Json> count_epochs(const std::string& path, const Node& value, double epochs);
  std::optional<Json> convert_every(const std::string& path, const Node& value, const Place& place);
  std::optional<Json> convert_stages(const std::string& path, const Field& field, const Node& value, const Place& place,
                                     Pass pass);
  std::optional<Json> convert_data(const std::string& path, const Field& field, const Node& value, const Place& place,
                                   Pass pass);
  std::optional<Json> convert_segments(const std::string& path, const Field& field, const Node& value,
                                       const Place& place, Pass pass);
  bool convert_weights(const std::string& path, const Entry& weights, Json& sources, Pass pass);
  std::optional<Json> convert_source(const std::string& path, const Node& value, Pass pass);
  std::optional<Json> convert_fields(const std::string& path, const Block& block, const Node& value, Pass pass);
  std::optional<Json> evaluate(const std::string& path, const Node& value, Pass pass);

  const std::vector<std::pair<std::string, std::string>>& files_;
  const Block& root_;
  std::map<std::string, TableMap> maps_;
  std::map<std::string, Setting> settings_;                      // by field path
  std::map<std::string, std::pair<std::string, Place>> blocks_;  // by path: its constructor ("" for a table), its place
  std::set<std::string> reported_;                               // fields with a mistake: not called missing as well
  std::map<std::string, std::optional<Json>> resolved_;
  std::vector<std::string> resolving_;
  std::vector<Diagnostic> diagnostics_;
  std::vector<Origin> stage_origins_;
  // Samples of an epoch, counted once: stages with other data ask the recipe before them. Empty: nothing can count.
  std::function<Result<int64_t>()> epoch_samples_;
};

}  // namespace cairn::dsl
