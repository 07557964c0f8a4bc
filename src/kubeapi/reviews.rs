//! Authentication and authorisation by the apiserver: TokenReview and SubjectAccessReview.

use std::collections::BTreeMap;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::PostParams;

use super::api::Api;
use super::failure::ApiFailure;

/// An authenticated user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The user's name.
    pub name: String,
    /// The user's unique id, if there is one.
    pub uid: String,
    /// The groups.
    pub groups: Vec<String>,
    /// More about the user.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// A request for a node's subresource that needs authorisation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAccess<'a> {
    /// The verb.
    pub verb: &'a str,
    /// The node.
    pub node: &'a str,
    /// The subresource.
    pub subresource: &'a str,
}

/// Authentication and authorisation by the apiserver.
#[async_trait]
pub trait Reviews: Send + Sync + 'static {
    /// Returns the user of a token; `None` if the token is invalid.
    async fn authenticate(&self, token: &str) -> Result<Option<Identity>, ApiFailure>;
    /// Whether a user is authorised.
    async fn authorize(&self, user: &Identity, access: &NodeAccess<'_>)
    -> Result<bool, ApiFailure>;
}

/// The reviews over kube.
pub struct KubeReviews(pub Client);

#[async_trait]
impl Reviews for KubeReviews {
    async fn authenticate(&self, token: &str) -> Result<Option<Identity>, ApiFailure> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.into(),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let answer = Api::<TokenReview>::all(self.0.clone())
            .create(&PostParams::default(), &review)
            .await?;
        let Some(status) = answer.status.filter(|s| s.authenticated == Some(true)) else {
            return Ok(None);
        };
        let user = status.user.unwrap_or_default();
        Ok(Some(Identity {
            name: user.username.unwrap_or_default(),
            uid: user.uid.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            extra: user.extra.unwrap_or_default(),
        }))
    }

    async fn authorize(
        &self,
        user: &Identity,
        access: &NodeAccess<'_>,
    ) -> Result<bool, ApiFailure> {
        let attributes = ResourceAttributes {
            verb: Some(access.verb.into()),
            version: Some("v1".into()),
            resource: Some("nodes".into()),
            subresource: Some(access.subresource.into()),
            name: Some(access.node.into()),
            ..ResourceAttributes::default()
        };
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.name.clone()),
                uid: Some(user.uid.clone()).filter(|u| !u.is_empty()),
                groups: Some(user.groups.clone()),
                extra: Some(user.extra.clone()).filter(|e| !e.is_empty()),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let answer = Api::<SubjectAccessReview>::all(self.0.clone())
            .create(&PostParams::default(), &review)
            .await?;
        Ok(answer
            .status
            .is_some_and(|s| s.allowed && s.denied != Some(true)))
    }
}
